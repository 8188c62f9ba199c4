/* Makes calls to the file system fail, for tests: LD_PRELOAD of what tests/support/disk_faults.py compiles from this.
 *
 * Calls on paths below a prefix are counted; from the n-th on, once or for good, they fail with an errno. A `write` may
 * first write a half, as a disk does that fills up. `fault_arm` and `fault_disarm` are for the process itself, by ctypes;
 * a program that cannot be changed takes RLJOB_FAULT = "PREFIX:CALLS:CONTAINS:NTH:ERRNO:FOREVER:SHORT:MARKER" (CALLS as
 * "write,fsync" or "*"; CONTAINS a part of the path, empty for any; MARKER a file that is made by the one process that
 * fails first: with FOREVER 0 no other does).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char prefix[PATH_MAX], calls[256], contains[256], marker[PATH_MAX];
    long nth, count, fired;
    int number, forever, shortened, armed, skip_sync;
} fault;

void fault_arm(const char *prefix, const char *calls, const char *contains, long nth, int number, int forever,
               int shortened, int skip_sync) {
    pthread_mutex_lock(&lock);
    snprintf(fault.prefix, sizeof fault.prefix, "%s", prefix);
    snprintf(fault.calls, sizeof fault.calls, "%s", calls);
    snprintf(fault.contains, sizeof fault.contains, "%s", contains);
    fault.marker[0] = 0;
    fault.nth = nth, fault.number = number, fault.forever = forever, fault.shortened = shortened;
    fault.skip_sync = skip_sync;
    fault.count = fault.fired = 0;
    fault.armed = 1;
    pthread_mutex_unlock(&lock);
}

/* No call fails any more; returns how many were counted. */
long fault_disarm(void) {
    pthread_mutex_lock(&lock);
    fault.armed = 0;
    long count = fault.count;
    pthread_mutex_unlock(&lock);
    return count;
}

long fault_fired(void) { return fault.fired; }

/* A fork that was given the variable after the library was loaded calls it itself. */
__attribute__((constructor)) void fault_from_environment(void) {
    const char *given = getenv("RLJOB_FAULT");
    if (given == NULL) return;
    char *text = strdup(given), *rest = text, *part[8];
    for (int i = 0; i < 8; i++)
        if ((part[i] = strsep(&rest, ":")) == NULL) {
            fprintf(stderr, "RLJOB_FAULT: %s: has %d parts, not 8\n", given, i);
            _exit(99);
        }
    fault_arm(part[0], part[1], part[2], atol(part[3]), atoi(part[4]), atoi(part[5]), atoi(part[6]), 0);
    snprintf(fault.marker, sizeof fault.marker, "%s", part[7]);
    free(text);
}

static int listed(const char *call) {
    if (!strcmp(fault.calls, "*")) return 1;
    size_t size = strlen(call);
    for (const char *at = fault.calls; (at = strstr(at, call)); at += size)
        if ((at == fault.calls || at[-1] == ',') && (at[size] == 0 || at[size] == ',')) return 1;
    return 0;
}

static int below(const char *path) {
    size_t size = strlen(fault.prefix);
    return !strncmp(path, fault.prefix, size) && (path[size] == 0 || path[size] == '/') &&
           strstr(path + size, fault.contains) != NULL;
}

static int first_of_all(void) {
    if (!fault.marker[0] || fault.fired) return 1;
    int made = syscall(SYS_openat, AT_FDCWD, fault.marker, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (made >= 0) syscall(SYS_close, made);
    return made >= 0 || fault.forever;
}

enum { PASS, FAIL, HALF };

/* What becomes of a call: it passes, it fails with errno set, or it writes a half and the next one fails. */
static int judge(const char *call, const char *path, size_t size) {
    int result = PASS, kept = errno;
    pthread_mutex_lock(&lock);
    if (fault.armed && path != NULL && listed(call) && below(path)) {
        fault.count++;
        int due = fault.forever ? fault.count >= fault.nth : fault.count == fault.nth;
        if (due && first_of_all()) {
            int half = fault.shortened && !fault.fired && size > 1;
            result = half ? HALF : FAIL;
            if (half) fault.nth++;
            fault.fired++;
        }
    }
    pthread_mutex_unlock(&lock);
    errno = result == FAIL ? fault.number : kept;
    return result;
}

static const char *path_of(int folder, const char *path, char *target) {
    char link[64];
    if (path != NULL && path[0] == '/') return path;
    if (folder == AT_FDCWD) {
        if (getcwd(target, PATH_MAX) == NULL) return NULL;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, target, PATH_MAX - 1);
        if (size < 0) return NULL;
        target[size] = 0;
    }
    if (path != NULL) {
        size_t size = strlen(target);
        snprintf(target + size, PATH_MAX - size, "/%s", path);
    }
    return target;
}

static int refused(const char *call, int folder, const char *path) {
    char target[PATH_MAX];
    if (!fault.armed) return 0;
    return judge(call, path_of(folder, path, target), 0) == FAIL;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int mode_of(int flags, va_list rest) {
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, int) : 0;
}

#define OPENS(name)                                                     \
    int name(const char *path, int flags, ...) {                        \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        int mode = mode_of(flags, rest);                                \
        va_end(rest);                                                   \
        if (refused("open", AT_FDCWD, path)) return -1;                 \
        return syscall(SYS_openat, AT_FDCWD, path, flags, mode);        \
    }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                  \
    int name(int folder, const char *path, int flags, ...) {            \
        va_list rest;                                                   \
        va_start(rest, flags);                                          \
        int mode = mode_of(flags, rest);                                \
        va_end(rest);                                                   \
        if (refused("open", folder, path)) return -1;                   \
        return syscall(SYS_openat, folder, path, flags, mode);          \
    }
OPENS_AT(openat)
OPENS_AT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    char target[PATH_MAX];
    int verdict = fault.armed ? judge("write", path_of(file, NULL, target), size) : PASS;
    if (verdict == FAIL) return -1;
    return syscall(SYS_write, file, data, verdict == HALF ? size / 2 : size);
}

ssize_t pwrite64(int file, const void *data, size_t size, off_t offset) {
    if (refused("pwrite", file, NULL)) return -1;
    return syscall(SYS_pwrite64, file, data, size, offset);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return pwrite64(file, data, size, offset); }

static int skipped(int file) {
    char target[PATH_MAX];
    const char *path = fault.armed && fault.skip_sync ? path_of(file, NULL, target) : NULL;
    return path != NULL && !strncmp(path, fault.prefix, strlen(fault.prefix));
}

int fsync(int file) {
    if (refused("fsync", file, NULL)) return -1;
    return skipped(file) ? 0 : syscall(SYS_fsync, file);
}
int fdatasync(int file) {
    if (refused("fdatasync", file, NULL)) return -1;
    return skipped(file) ? 0 : syscall(SYS_fdatasync, file);
}

int ftruncate64(int file, off_t size) { return refused("ftruncate", file, NULL) ? -1 : syscall(SYS_ftruncate, file, size); }
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }
int truncate64(const char *path, off_t size) {
    return refused("truncate", AT_FDCWD, path) ? -1 : syscall(SYS_truncate, path, size);
}
int truncate(const char *path, off_t size) { return truncate64(path, size); }
int flock(int file, int how) { return refused("flock", file, NULL) ? -1 : syscall(SYS_flock, file, how); }
int rename(const char *from, const char *to) { return refused("rename", AT_FDCWD, from) ? -1 : REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return refused("mkdir", AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode); }
int rmdir(const char *path) { return refused("rmdir", AT_FDCWD, path) ? -1 : REAL(rmdir)(path); }
int unlink(const char *path) { return refused("unlink", AT_FDCWD, path) ? -1 : REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) {
    return refused(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path) ? -1 : REAL(unlinkat)(folder, path, flags);
}
