// SPDX-License-Identifier: Apache-2.0
// What may stand at the path of a file that is to be written. Writers create a file beside its
// place, under temporary_name(), and publish() it when it is whole.
#pragma once

#include <string>
#include <vector>

#include "tierkv/status.h"

namespace tierkv {

// The name that a writer renames to: `path` with symbolic links followed, so that a link stays a
// link. kIo where something stands there that is no regular file (a folder, a device, a pipe).
Result<std::string> output_target(const std::string& path);

// Whether a command may write `path`. kIo where it is the same file as one of `inputs`, by device
// and inode, as the standard output, or where it exists and `overwrite` is false. Inputs that
// are empty or missing are skipped. What is no regular file passes: output_target() decides about
// it.
Status check_output(const std::string& path, bool overwrite,
                    const std::vector<std::string>& inputs);

// Renames a file that is whole; a file that it replaces leaves it its permissions. Without
// `overwrite`: kIo where something is at `target` already.
Status publish(const std::string& temporary, const std::string& target, bool overwrite);

// The name of a file until it is whole, unique to this process and call.
std::string temporary_name(const std::string& path);

}  // namespace tierkv
