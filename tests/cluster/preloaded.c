// Stands in for the memory saver's hook: it writes down which processes loaded it, and changes nothing.
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

__attribute__((constructor)) static void loaded(void) {
  const char *path = getenv("RLJOB_TEST_PRELOADED");
  FILE *file = path == NULL ? NULL : fopen(path, "a");
  if (file != NULL) {
    fprintf(file, "%d\n", (int)getpid());
    fclose(file);
  }
}
