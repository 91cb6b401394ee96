// SPDX-License-Identifier: Apache-2.0
// The `tierkv` command. Data goes to stdout, messages and progress to stderr. Exit codes:
// tools/command/command.h.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <csignal>

#include "datasets/dump.h"
#include "tools/command/command.h"
#include "tools/command/interrupt.h"

namespace tierkv::tools {
namespace {

// No value of an option or argument is empty.
void refuse_empty(CLI::App& app) {
  const auto why_not = [](const std::string& text) {
    return text.empty() ? std::string("is empty") : std::string();
  };
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    for (CLI::Option* option : command->get_options()) option->check(why_not);
  }
}

// The exit code for words that CLI11 would take for something else; kExitOk where there are none.
int check_words(const CLI::App& app, int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  // A word that is no command is an error, not something that --help behind it makes good.
  if (argc > 1 && first[0] != '-') {
    const auto is_named = [&](const CLI::App* c) { return c->check_name(first); };
    if (app.get_subcommands(is_named).empty())
      return report_error("unknown command '" + first + "' (see tierkv --help)", kExitUsage);
  } else if (argc > 1 && app.get_option_no_throw(first) == nullptr) {
    return report_error("unknown option '" + first + "' (see tierkv --help)", kExitUsage);
  }
  // CLI11 would take the next word for the value of `--option=`.
  for (int i = 2; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--") && word.find('=') == word.size() - 1)
      return report_error(word.substr(0, word.size() - 1) + ": is empty", kExitBadInput);
  }
  return kExitOk;
}

}  // namespace
}  // namespace tierkv::tools

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
  app.failure_message([](const CLI::App* a, const CLI::Error& e) {
    return "tierkv: " + CLI::FailureMessage::simple(a, e);
  });
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
  const std::string name = argc > 1 ? argv[1] : "tierkv";
  refuse_empty(app);
  if (const int code = check_words(app, argc, argv); code != kExitOk) return code;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ValidationError& e) {
    return report_error(e.what(), kExitBadInput);
  } catch (const CLI::ConversionError& e) {
    return report_error(e.what(), kExitBadInput);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kExitOk : kExitUsage;
  } catch (const Interrupted& interrupted) {
    std::raise(interrupted.signal);
  } catch (const std::bad_alloc&) {
    return report_error(name + ": out of memory", kExitBadInput);
  } catch (const std::exception& e) {
    return report_error(name + ": " + e.what(), kExitBadInput);
  }
  return exit_code;
}
