// A stand-in for libascendcl: device memory is host memory, counted against STUB_HBM_BYTES.
// Names that RLJob relies on exist only where the register of contracts has them (-DHAVE_<name>).
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
  char *start;
  size_t size;
  char name[64];
} Export;

static size_t used;
static Export exports[4096];
static int made;

static size_t total(void) {
  const char *text = getenv("STUB_HBM_BYTES");
  return text ? strtoull(text, 0, 10) : (size_t)4 << 30;
}

int stub_take(size_t size) {
  if (used + size > total()) return 1;
  used += size;
  return 0;
}

void stub_give(size_t size) { used -= size; }

void stub_memory(size_t *free_bytes, size_t *all) {
  *all = total();
  *free_bytes = *all - used;
}

// Ordinary device memory lies in a named file, so that another process can open it; mapped (VMM) memory does not.
static int allocate(void **out, size_t size) {
  if (stub_take(size)) return 207001;
  if (made == 4096) abort();
  Export *entry = &exports[made++];
  snprintf(entry->name, sizeof entry->name, "/stub-hbm-%d-%d", getpid(), made);
  int file = shm_open(entry->name, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, size)) abort();
  entry->start = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  entry->size = size;
  close(file);
  *out = entry->start;
  return 0;
}

static int release(void *pointer) {
  for (int i = 0; i < made; i++) {
    if (exports[i].start != pointer) continue;
    munmap(pointer, exports[i].size);
    shm_unlink(exports[i].name);
    stub_give(exports[i].size);
    exports[i].start = 0;
    return 0;
  }
  return 1;
}

#ifdef HAVE_aclrtMallocAlign32
int aclrtMallocAlign32(void **out, size_t size, int policy) { return allocate(out, size); }
#endif
#ifdef HAVE_aclrtFree
int aclrtFree(void *pointer) { return release(pointer); }
#endif

int stub_export(const char *pointer, char *name, size_t *offset) {
  for (int i = 0; i < made; i++) {
    if (exports[i].start && pointer >= exports[i].start && pointer < exports[i].start + exports[i].size) {
      strcpy(name, exports[i].name);
      *offset = pointer - exports[i].start;
      return 0;
    }
  }
  return 1;
}

void *stub_open(const char *name, size_t size) {
  int file = shm_open(name, O_RDWR, 0);
  if (file < 0) return 0;
  void *start = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return start == MAP_FAILED ? 0 : start;
}

__attribute__((destructor)) static void clean(void) {
  for (int i = 0; i < made; i++)
    if (exports[i].start) shm_unlink(exports[i].name);
}
