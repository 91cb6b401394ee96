// SPDX-License-Identifier: Apache-2.0
// The `tierkv` command. Data goes to stdout, messages and progress to stderr. Exit codes:
// tools/command/command.h.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <csignal>

#include "datasets/dump.h"
#include "tools/command/command.h"
#include "tools/command/interrupt.h"

int main(int argc, char** argv) {
  using namespace tierkv::tools;
  // Layer after layer takes buffers of the same megabytes: keep them instead of giving them back to
  // the system, whose fresh pages cost as much as encoding what is written into them.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  // A file that grows past its limit is a write that fails, with a message and nothing left behind.
  std::signal(SIGXFSZ, SIG_IGN);
  tierkv::datasets::leave_hdf5_as_it_is_at_exit();
  CLI::App app("tierkv: what compression does to a KV cache");
  app.set_version_flag("--version", TIERKV_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 success; 1 verify found damage; 2 a word or option is unknown or missing;\n"
      "3 a value, preset or file is wrong, or an output cannot be written: the message names it.");
  int exit_code = kExitOk;
  add_info(app, &exit_code);
  add_analyze(app, &exit_code);
  add_sweep(app, &exit_code);
  add_calibrate(app, &exit_code);
  add_synth(app, &exit_code);
  add_compress(app, &exit_code);
  add_decompress(app, &exit_code);
  add_verify(app, &exit_code);
  add_convert(app, &exit_code);
  try {
    // A word that is no command is an error, not something that --help behind it makes good.
    const auto is_named = [&](const CLI::App* c) { return c->check_name(argv[1]); };
    if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty()) {
      return report_error("unknown command '" + std::string(argv[1]) + "' (see tierkv --help)",
                          kExitUsage);
    }
    app.parse(argc, argv);
  } catch (const CLI::ValidationError& e) {
    return report_error(e.what(), kExitBadInput);
  } catch (const CLI::ConversionError& e) {
    return report_error(e.what(), kExitBadInput);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kExitOk : kExitUsage;
  } catch (const Interrupted& interrupted) {
    std::raise(interrupted.signal);
  }
  return exit_code;
}
