// A stand-in for torch_memory_saver's Ascend build over the runtime's own virtual memory, with the behaviour of its core.cpp
// at the recorded revision: it keeps no state; a second pause, freeing paused memory and short memory end the process.
#define _GNU_SOURCE
#include <acl/acl.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct {
  void *start;
  size_t size;
  aclrtDrvMemHandle physical;
  bool backup;
  char tag[32];
  void *host;
} Allocation;

static Allocation allocations[4096];
static int made;
static __thread int tracking = -1, backup = -1;
static __thread char current_tag[32] = "default";

static void need(bool condition, const char *what) {
  if (condition) return;
  fprintf(stderr, "[stub torch_memory_saver] %s failed.\n", what);
  exit(1);
}

static bool flag(int *value, const char *variable) {
  const char *text = getenv(variable);
  if (*value < 0) *value = text && (!strcmp(text, "1") || !strcasecmp(text, "true") || !strcasecmp(text, "yes"));
  return *value;
}

static bool is_tracking(void) { return flag(&tracking, "TMS_INIT_ENABLE"); }

static void map(Allocation *a) {
  aclrtPhysicalMemProp prop = {0};
  need(!aclrtMallocPhysical(&a->physical, a->size, &prop, 0), "aclrtMallocPhysical");
  need(!aclrtMapMem(a->start, a->size, 0, a->physical, 0), "aclrtMapMem");
}

static void unmap(Allocation *a) {
  need(!aclrtUnmapMem(a->start), "aclrtUnmapMem");
  need(!aclrtFreePhysical(a->physical), "aclrtFreePhysical");
}

static void *track(size_t size) {
  need(made < 4096, "stub table");
  Allocation *a = &allocations[made++];
  size = (size + (2 << 20) - 1) >> 21 << 21;
  *a = (Allocation){.size = size, .backup = flag(&backup, "TMS_INIT_ENABLE_CPU_BACKUP")};
  strcpy(a->tag, current_tag);
  need(!aclrtReserveMemAddress(&a->start, size, 0, 0, 0), "aclrtReserveMemAddress");
  map(a);
  return a->start;
}

static bool untrack(void *pointer) {
  for (int i = 0; i < made; i++) {
    Allocation *a = &allocations[i];
    if (a->start != pointer) continue;
    unmap(a);
    aclrtReleaseMemAddress(a->start);
    free(a->host);
    a->start = 0;
    return true;
  }
  return false;
}

#ifdef PRELOAD
aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) {
  aclError (*real)(void **, size_t, aclrtMemMallocPolicy) = dlsym(RTLD_NEXT, "aclrtMallocAlign32");
  // Inert: as with a torch_npu that looks the function up past LD_PRELOAD.
  if (!is_tracking() || getenv("SAVER_INERT")) return real(out, size, policy);
  *out = track(size);
  return 0;
}
aclError aclrtFree(void *pointer) {
  aclError (*real)(void *) = dlsym(RTLD_NEXT, "aclrtFree");
  return untrack(pointer) ? 0 : real(pointer);
}
#else
void *tms_torch_malloc(ssize_t size, int device, void *stream) {
  need(is_tracking(), "only support interesting region");
  return track(size);
}
void tms_torch_free(void *pointer, ssize_t size, int device, void *stream) {
  need(is_tracking(), "only support interesting region");
  need(untrack(pointer), "free");
}
#endif

void tms_set_interesting_region(bool value) { tracking = value; }
bool tms_get_interesting_region(void) { return is_tracking(); }
void tms_set_current_tag(const char *tag) {
  need(tag && strlen(tag) < 32, "tag");
  strcpy(current_tag, tag);
}
void tms_set_enable_cpu_backup(bool value) { backup = value; }

void tms_pause(const char *tag) {
  for (int i = 0; i < made; i++) {
    Allocation *a = &allocations[i];
    if (!a->start || (tag && strcmp(tag, a->tag))) continue;
    if (a->backup) {
      if (!a->host) a->host = malloc(a->size);
      need(!aclrtMemcpy(a->host, a->size, a->start, a->size, ACL_MEMCPY_DEVICE_TO_HOST), "aclrtMemcpy");
    }
    unmap(a);
  }
}

void tms_resume(const char *tag) {
  for (int i = 0; i < made; i++) {
    Allocation *a = &allocations[i];
    if (!a->start || (tag && strcmp(tag, a->tag))) continue;
    // Resuming what is mapped takes physical memory that nothing gives back, as in the real one.
    map(a);
    if (!a->backup) memset(a->start, 0xEE, a->size);
    else if (a->host) need(!aclrtMemcpy(a->start, a->size, a->host, a->size, ACL_MEMCPY_HOST_TO_DEVICE), "aclrtMemcpy");
  }
}
