// A stand-in for torch_memory_saver's Ascend build, with the behaviour of its core.cpp at the recorded revision:
// it keeps no state, a second pause or freeing paused memory ends the process with code 1, and so does short memory.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/types.h>

int stub_take(size_t size);
void stub_give(size_t size);

typedef struct {
  char *start;
  size_t size;
  bool mapped, backup;
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
  need(!stub_take(a->size), "aclrtMallocPhysical");
  mmap(a->start, a->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  a->mapped = true;
}

static void unmap(Allocation *a) {
  need(a->mapped, "aclrtUnmapMem");
  mmap(a->start, a->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  stub_give(a->size);
  a->mapped = false;
}

static void *track(size_t size) {
  need(made < 4096, "stub table");
  Allocation *a = &allocations[made++];
  *a = (Allocation){.size = size, .backup = flag(&backup, "TMS_INIT_ENABLE_CPU_BACKUP")};
  strcpy(a->tag, current_tag);
  a->start = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  map(a);
  return a->start;
}

static bool untrack(void *pointer) {
  for (int i = 0; i < made; i++) {
    Allocation *a = &allocations[i];
    if (a->start != pointer) continue;
    unmap(a);
    munmap(a->start, a->size);
    free(a->host);
    a->start = 0;
    return true;
  }
  return false;
}

#ifdef STUB_PRELOAD
#ifdef HAVE_aclrtMallocAlign32
int aclrtMallocAlign32(void **out, size_t size, int policy) {
  int (*real)(void **, size_t, int) = dlsym(RTLD_NEXT, "aclrtMallocAlign32");
  if (!is_tracking()) return real(out, size, policy);
  *out = track(size);
  return 0;
}
#endif
#ifdef HAVE_aclrtFree
int aclrtFree(void *pointer) {
  int (*real)(void *) = dlsym(RTLD_NEXT, "aclrtFree");
  return untrack(pointer) ? 0 : real(pointer);
}
#endif
#else
#ifdef HAVE_tms_torch_malloc
void *tms_torch_malloc(ssize_t size, int device, void *stream) {
  need(is_tracking(), "only support interesting region");
  return track(size);
}
#endif
#ifdef HAVE_tms_torch_free
void tms_torch_free(void *pointer, ssize_t size, int device, void *stream) {
  need(is_tracking(), "only support interesting region");
  need(untrack(pointer), "free");
}
#endif
#endif

#ifdef HAVE_tms_set_interesting_region
void tms_set_interesting_region(bool value) { tracking = value; }
#endif
#ifdef HAVE_tms_get_interesting_region
bool tms_get_interesting_region(void) { return is_tracking(); }
#endif
#ifdef HAVE_tms_set_current_tag
void tms_set_current_tag(const char *tag) {
  need(tag && strlen(tag) < 32, "tag");
  strcpy(current_tag, tag);
}
#endif
#ifdef HAVE_tms_set_enable_cpu_backup
void tms_set_enable_cpu_backup(bool value) { backup = value; }
#endif

#ifdef HAVE_tms_pause
void tms_pause(const char *tag) {
  for (int i = 0; i < made; i++) {
    Allocation *a = &allocations[i];
    if (!a->start || (tag && strcmp(tag, a->tag))) continue;
    if (a->backup) {
      need(a->mapped, "aclrtMemcpy");
      if (!a->host) a->host = malloc(a->size);
      memcpy(a->host, a->start, a->size);
    }
    unmap(a);
  }
}
#endif

#ifdef HAVE_tms_resume
void tms_resume(const char *tag) {
  for (int i = 0; i < made; i++) {
    Allocation *a = &allocations[i];
    if (!a->start || (tag && strcmp(tag, a->tag))) continue;
    // Resuming what is mapped takes physical memory that nothing gives back, as in the real one.
    map(a);
    if (!a->backup) memset(a->start, 0xEE, a->size);
    else if (a->host) memcpy(a->start, a->host, a->size);
  }
}
#endif
