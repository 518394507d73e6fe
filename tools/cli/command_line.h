#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/exit_code.h"
#include "cli/terminal.h"

namespace tessera::cli {

/// Thrown for a wrong command line; the tool ends with ExitCode::usage and names `help_command`.
class UsageError : public std::runtime_error {
 public:
  UsageError(const std::string& what, std::string help_command)
      : std::runtime_error(what), help_command_(std::move(help_command)) {}
  const std::string& help_command() const { return help_command_; }

 private:
  std::string help_command_;
};

/// The arguments and options of one command (a verb, or the tool itself). Parsing the command line
/// sets the targets that the functions below get; they must live until then.
class Command {
 public:
  struct Argument {
    std::string name;  // `PATH`, `GLOB...`
    std::string help;
    std::string* one = nullptr;
    std::vector<std::string>* many = nullptr;  // gets any number of values
  };
  struct Option {
    std::string name;         // `--depth`; `-o,--output`
    std::string placeholder;  // `N`; empty for a flag
    std::string help;
    std::function<void(const std::string&)> set;  // throws std::invalid_argument for a wrong text
    std::vector<std::string> choices{};           // offered by completion

    std::string with_placeholder() const;  // `--depth N`
  };
  struct Example {
    std::string line;  // without the tool's name
    std::string what;
  };

  Command(std::string name, std::string summary, std::function<ExitCode()> run);

  /// Adds a required positional argument.
  Command& argument(std::string name, std::string& target, std::string help);
  /// Adds a positional argument that takes any number of values: `GLOB...`. Arguments that are
  /// added later take the last values. A command has at most one such argument.
  Command& arguments(std::string name, std::vector<std::string>& target, std::string help);

  // In the help texts of the options below, `{}` is replaced by the target's value at the time of
  // the call (the default).

  Command& flag(std::string name, bool& target, std::string help);
  Command& option(std::string name, std::string placeholder, std::string& target, std::string help);
  Command& option(std::string name, std::string placeholder, int& target, std::string help);
  Command& option(std::string name, std::string placeholder, double& target, std::string help);
  /// The target stays empty if the option is not given.
  Command& option(std::string name, std::string placeholder, std::optional<double>& target,
                  std::string help);
  /// Adds a value to the target each time that the option is given.
  Command& option(std::string name, std::string placeholder, std::vector<std::string>& target,
                  std::string help);
  Command& size_option(std::string name, std::string placeholder, std::uint64_t& target_nbytes,
                       std::string help);
  /// Takes one of `choices`, and calls `set` with it.
  Command& choice(std::string name, std::vector<std::string> choices,
                  std::function<void(const std::string&)> set, std::string help);

  Command& describe(std::string paragraph);  // shown in the help after the summary
  Command& example(std::string line, std::string what);

  const std::string& name() const { return name_; }
  const std::string& summary() const { return summary_; }
  const std::vector<std::string>& description() const { return description_; }
  const std::vector<Argument>& arguments() const { return arguments_; }
  const std::vector<Option>& options() const { return options_; }
  const std::vector<Example>& examples() const { return examples_; }
  ExitCode run() const { return run_(); }

 private:
  std::string name_;
  std::string summary_;
  std::function<ExitCode()> run_;
  std::vector<std::string> description_;
  std::vector<Argument> arguments_;
  std::vector<Option> options_;
  std::vector<Example> examples_;
};

/// A tool's command line: its commands, their help, `--version`, `--color`, and `--completion
/// SHELL` and `--man` for packagers.
class CommandLine {
 public:
  CommandLine(std::string tool, std::string summary, Terminal& terminal);

  /// Adds a command and returns it. If the name is empty, the command runs when no verb is given.
  /// The reference stays valid.
  Command& add_command(std::string name, std::string summary, std::function<ExitCode()> run);
  /// Adds a section to the tool's help and manual page: names, each with its meaning.
  void add_section(std::string title, std::vector<std::pair<std::string, std::string>> rows) {
    sections_.push_back({std::move(title), std::move(rows)});
  }
  /// Sets the command that runs if the first argument is no verb. Default: the one without a name.
  void set_default_command(std::string name) { default_command_ = std::move(name); }
  /// Parses and runs. Throws: UsageError, and what the command throws.
  ExitCode run(int argc, const char* const* argv);

 private:
  void add_common_options();
  const Command* find(std::string_view name) const;
  const Command& command_for(std::vector<std::string>& arguments) const;
  void parse(const Command& command, std::vector<std::string> arguments) const;
  std::string usage(const Command& command) const;
  std::string help() const;
  std::string help(const Command& command) const;
  std::string man_page() const;
  std::string sections(std::size_t width) const;

  struct ExtraSection {
    std::string title;
    std::vector<std::pair<std::string, std::string>> rows;
  };

  std::string tool_;
  std::string summary_;
  Terminal& terminal_;
  std::vector<ExtraSection> sections_;
  std::string default_command_;
  std::string endpoint_;  // --endpoint
  std::vector<std::unique_ptr<Command>> commands_;
  bool has_common_options_ = false;
};

/// Returns the text broken at spaces into lines of at most `width` columns. Then indents all lines
/// after the first by `indent` spaces, which `width` does not include.
std::string wrap(std::string_view text, std::size_t width, std::size_t indent);

}  // namespace tessera::cli
