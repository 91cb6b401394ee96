// SPDX-License-Identifier: Apache-2.0
// What libstdc++ of a newer system takes from its C library and glibc 2.28 does not have.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

// glibc 2.32. False is always right: reference counts are then atomic.
char __libc_single_threaded = 0;

// glibc 2.36, for std::random_device.
uint32_t arc4random(void) {
  uint32_t value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) abort();
  return value;
}

// glibc 2.30, for waits of std::condition_variable on the steady clock. A step of the system's clock moves their end, and callers
// ask their clock again.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* end) {
  struct timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += end->tv_sec - now.tv_sec;
  real.tv_nsec += end->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) {
    real.tv_nsec += 1000000000;
    --real.tv_sec;
  } else if (real.tv_nsec >= 1000000000) {
    real.tv_nsec -= 1000000000;
    ++real.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &real);
}
