// SPDX-License-Identifier: Apache-2.0
#include "tools/command/interrupt.h"

#include <atomic>
#include <csignal>

namespace tierkv::tools {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGXCPU, SIGALRM};
std::atomic<int> noted{0};
static_assert(std::atomic<int>::is_always_lock_free);  // a signal handler may write it

extern "C" void note_signal(int signal) {
  noted = signal;
}

}  // namespace

Interrupt::Interrupt() {
  for (const int signal : kSignals) {
    struct sigaction before, ours = {};
    ours.sa_handler = note_signal;
    ours.sa_flags = SA_RESETHAND | SA_RESTART;
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_DFL) {
      sigaction(signal, &ours, nullptr);
    }
  }
}

Interrupt::~Interrupt() {
  for (const int signal : kSignals) {
    struct sigaction now;
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == note_signal) {
      std::signal(signal, SIG_DFL);
    }
  }
}

void Interrupt::check() const {
  if (const int signal = noted; signal != 0) throw Interrupted{signal};
}

}  // namespace tierkv::tools
