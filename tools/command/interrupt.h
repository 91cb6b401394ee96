// SPDX-License-Identifier: Apache-2.0
// Ends a command that writes a file early and leaves no part of the file behind.
#pragma once

namespace tierkv::tools {

// What check() throws: through the analysis, whose writers remove what they began, to main(), which
// ends the process as the signal would have.
struct Interrupted {
  int signal;
};

// While it lives the first SIGINT, SIGTERM, SIGHUP, SIGQUIT or SIGPIPE that is not ignored is only
// noted; a second one ends the process at once. One at a time.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;
  void check() const;
};

}  // namespace tierkv::tools
