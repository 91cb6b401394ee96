/* What the static HDF5 library calls stderr and stdout in the wheel; see CMakeLists.txt. */
#include <stdio.h>

#define TIERKV_HIDDEN __attribute__((visibility("hidden")))

extern TIERKV_HIDDEN FILE* tierkv_stderr;
extern TIERKV_HIDDEN FILE* tierkv_stdout;
FILE* tierkv_stderr;
FILE* tierkv_stdout;

__attribute__((constructor)) static void bind_streams(void) {
  tierkv_stderr = stderr;
  tierkv_stdout = stdout;
}
