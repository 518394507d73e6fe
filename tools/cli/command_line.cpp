#include "cli/command_line.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include <CLI/CLI.hpp>

#include "base/size_text.h"
#include "base/word_list.h"
#include "cli/completion.h"
#include "object_store/files.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/base/name_rules.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMaxHelpWidth = 100;

template <class Number>
Number parse_number(const std::string& text, const char* what) {
  Number number{};
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
    throw std::invalid_argument(std::string("expected ") + what + ", found '" + printable(text) +
                                "'");
  }
  return number;
}

/// Returns a function that parses a number >= 0 into `target`, or throws std::invalid_argument.
template <class Number, class Target>
std::function<void(const std::string&)> number_setter(Target& target, const char* what) {
  return [&target, what](const std::string& text) {
    const Number number = parse_number<Number>(text, what);
    if (!(number >= 0)) throw std::invalid_argument("expected 0 or more, found " + text);
    target = number;
  };
}

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += separator;
    text += word;
  }
  return text;
}

// Returns a help text in which `{}` is replaced by an option's default.
std::string with_default(std::string help, const std::string& value) {
  const std::size_t place = help.find("{}");
  return place == std::string::npos ? help : help.replace(place, 2, value);
}

template <class Number>
std::string spell_number(Number number) {
  std::array<char, 32> text;
  return {text.begin(), std::to_chars(text.begin(), text.end(), number).ptr};
}

// Writes a section of a help text: a title, and under it rows ` name text` whose text is wrapped.
// After a long name, the text begins in the next line.
class Section {
 public:
  Section(std::string title, std::size_t width) : title_(std::move(title)), width_(width) {}
  void add(std::string name, std::string text) {
    if (name.size() <= kMaxNameWidth) name_width_ = std::max(name_width_, name.size());
    rows_.emplace_back(std::move(name), std::move(text));
  }
  std::string text() const {
    if (rows_.empty()) return {};
    std::string text = "\n" + title_ + "\n";
    const std::size_t indent = 2 + name_width_ + 2;
    for (const auto& [name, row] : rows_) {
      text += "  " + name;
      text += name.size() <= name_width_ ? std::string(name_width_ + 2 - name.size(), ' ')
                                         : "\n" + std::string(indent, ' ');
      text += wrap(row, width_ - indent, indent) + "\n";
    }
    return text;
  }

 private:
  static constexpr std::size_t kMaxNameWidth = 26;

  std::string title_;
  std::size_t width_;
  std::size_t name_width_ = 0;
  std::vector<std::pair<std::string, std::string>> rows_;
};

// Keeps CLI11 from splitting an argument such as `[a,b]` as a list: appends a NUL, which no
// argument of a program can contain.
void keep_whole(std::string& argument) {
  if (argument.starts_with('[') && argument.ends_with(']')) argument += '\0';
}
std::string as_given(std::string argument) {
  if (argument.ends_with('\0')) argument.pop_back();
  return argument;
}

// Adds an option to `app`, or a flag if it takes no value. CLI11 sets the option's target while it
// parses, so `option` and `help_command` must live until then.
void add_option(CLI::App& app, const Command::Option& option, const std::string& help_command) {
  if (option.placeholder.empty()) {
    app.add_flag_callback(option.name, [&option] { option.set({}); });
    return;
  }
  app.add_option_function<std::vector<std::string>>(
         option.name,
         [&option, &help_command](const std::vector<std::string>& values) {
           for (const std::string& value : values) {
             try {
               option.set(as_given(value));
             } catch (const std::invalid_argument& error) {
               throw UsageError(option.name + ": " + error.what(), help_command);
             }
           }
         })
      ->allow_extra_args(false)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

// Parses the arguments. Throws a UsageError where CLI11 throws one of its own errors.
void parse_arguments(CLI::App& app, std::vector<std::string> arguments,
                     const std::string& help_command) {
  for (std::string& argument : arguments) keep_whole(argument);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 expects the last argument first
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ExtrasError& error) {
    throw UsageError(
        "unknown option " +
            printable(
                std::string(error.what()).substr(std::string_view(error.what()).rfind(' ') + 1)),
        help_command);
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string_view what = error.what();
    throw UsageError(std::string(what.substr(0, what.find(':'))) + ": a value is missing",
                     help_command);
  } catch (const CLI::ParseError& error) {
    throw UsageError(printable(error.what()), help_command);
  }
}

/// Returns the message about an argument that is missing. If the command takes several arguments of
/// one name, as `merge SRC SRC DST` does, the message says how many it needs.
std::string missing_argument(const Command& command, const std::string& name,
                             std::size_t num_found) {
  const std::vector<Command::Argument>& all = command.arguments();
  if (all.size() < 3 || all[0].name != all[1].name) return name + " is missing";
  return "expected at least two " + all[0].name + " and " + all.back().name + ", found " +
         counted(num_found, "argument");
}

/// Assigns each word of `positionals` to an argument of the command. An argument that takes any
/// number of values gets all words that the other arguments do not need.
void assign_positionals(const Command& command, const std::vector<std::string>& positionals,
                        const std::string& help_command) {
  std::size_t next = 0;
  std::size_t num_behind = command.arguments().size();
  for (const Command::Argument& argument : command.arguments()) {
    --num_behind;
    if (argument.many != nullptr) {
      for (; next + num_behind < positionals.size(); ++next) {
        argument.many->push_back(positionals[next]);
      }
    } else if (next == positionals.size()) {
      throw UsageError(missing_argument(command, argument.name, positionals.size()), help_command);
    } else {
      *argument.one = positionals[next++];
    }
  }
  if (next < positionals.size()) {
    throw UsageError("unexpected argument '" + printable(positionals[next]) + "'", help_command);
  }
}

bool is_bare_word(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || c == '-';
  }) && text.front() != '-';
}

}  // namespace

std::string Command::Option::with_placeholder() const {
  return placeholder.empty() ? name : name + " " + placeholder;
}

Command::Command(std::string name, std::string summary, std::function<ExitCode()> run)
    : name_(std::move(name)), summary_(std::move(summary)), run_(std::move(run)) {}

Command& Command::argument(std::string name, std::string& target, std::string help) {
  arguments_.push_back({std::move(name), std::move(help), &target, nullptr});
  return *this;
}

Command& Command::arguments(std::string name, std::vector<std::string>& target, std::string help) {
  arguments_.push_back({std::move(name), std::move(help), nullptr, &target});
  return *this;
}

Command& Command::flag(std::string name, bool& target, std::string help) {
  options_.push_back(
      {std::move(name), {}, std::move(help), [&target](const std::string&) { target = true; }});
  return *this;
}

Command& Command::option(std::string name, std::string placeholder, std::string& target,
                         std::string help) {
  const auto set = [&target, placeholder](const std::string& text) {
    // Refuses an empty value, which is probably an unset shell variable.
    if (text.empty()) throw std::invalid_argument("expected " + placeholder + ", found ''");
    target = text;
  };
  options_.push_back(
      {std::move(name), std::move(placeholder), with_default(std::move(help), target), set});
  return *this;
}

Command& Command::option(std::string name, std::string placeholder, int& target, std::string help) {
  options_.push_back({std::move(name), std::move(placeholder),
                      with_default(std::move(help), spell_number(target)),
                      number_setter<int>(target, "a whole number")});
  return *this;
}

Command& Command::option(std::string name, std::string placeholder, double& target,
                         std::string help) {
  options_.push_back({std::move(name), std::move(placeholder),
                      with_default(std::move(help), spell_number(target)),
                      number_setter<double>(target, "a number")});
  return *this;
}

Command& Command::option(std::string name, std::string placeholder, std::optional<double>& target,
                         std::string help) {
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      number_setter<double>(target, "a number")});
  return *this;
}

Command& Command::option(std::string name, std::string placeholder,
                         std::vector<std::string>& target, std::string help) {
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      [&target](const std::string& text) { target.push_back(text); }});
  return *this;
}

Command& Command::size_option(std::string name, std::string placeholder,
                              std::uint64_t& target_nbytes, std::string help) {
  options_.push_back({std::move(name), std::move(placeholder),
                      with_default(std::move(help), spell_size(target_nbytes)),
                      [&target_nbytes](const std::string& text) {
                        const auto nbytes = parse_size(text);
                        if (!nbytes) {
                          throw std::invalid_argument("expected a size such as 256MiB, found '" +
                                                      printable(text) + "'");
                        }
                        target_nbytes = *nbytes;
                      }});
  return *this;
}

Command& Command::choice(std::string name, std::vector<std::string> choices,
                         std::function<void(const std::string&)> set, std::string help) {
  auto check_and_set = [choices, set = std::move(set)](const std::string& text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
      throw std::invalid_argument("expected " + detail::choice_of(choices) + ", found '" +
                                  printable(text) + "'");
    }
    set(text);
  };
  std::string placeholder = joined(choices, "|");
  options_.push_back({std::move(name), std::move(placeholder), std::move(help),
                      std::move(check_and_set), std::move(choices)});
  return *this;
}

Command& Command::describe(std::string paragraph) {
  description_.push_back(std::move(paragraph));
  return *this;
}

Command& Command::example(std::string line, std::string what) {
  examples_.push_back({std::move(line), std::move(what)});
  return *this;
}

CommandLine::CommandLine(std::string tool, std::string summary, Terminal& terminal)
    : tool_(std::move(tool)), summary_(std::move(summary)), terminal_(terminal) {}

Command& CommandLine::add_command(std::string name, std::string summary,
                                  std::function<ExitCode()> run) {
  commands_.push_back(
      std::make_unique<Command>(std::move(name), std::move(summary), std::move(run)));
  return *commands_.back();
}

// Adds the options that all commands share. They come last, so that the help shows a command's own
// options first.
void CommandLine::add_common_options() {
  if (std::exchange(has_common_options_, true)) return;
  for (const auto& command : commands_) {
    command->option("--endpoint", "URL", endpoint_,
                    "Server for s3:// paths, such as http://localhost:9000 (default: "
                    "AWS_ENDPOINT_URL, or else AWS)");
    command->choice(
        "--color", {"auto", "always", "never"},
        [this](const std::string& when) {
          terminal_.set_color(when == "always"  ? ColorChoice::always
                              : when == "never" ? ColorChoice::never
                                                : ColorChoice::automatic);
        },
        "Colour the output. auto: only on a terminal, and not if NO_COLOR is set");
  }
}

const Command* CommandLine::find(std::string_view name) const {
  for (const auto& command : commands_) {
    if (command->name() == name) return command.get();
  }
  return nullptr;
}

// Returns the command whose verb comes first, and removes the verb. Without a verb: the default.
const Command& CommandLine::command_for(std::vector<std::string>& arguments) const {
  if (arguments.empty())
    throw UsageError("expected a command or a checkpoint, found no arguments", tool_ + " --help");
  if (!arguments.front().empty()) {
    if (const Command* command = find(arguments.front())) {
      arguments.erase(arguments.begin());
      return *command;
    }
    const std::string& word = arguments.front();
    if (commands_.size() > 1 && is_bare_word(word) && !FileSystem::posix().kind_of(word)) {
      std::vector<std::string_view> names;
      for (const auto& command : commands_) {
        if (!command->name().empty()) names.push_back(command->name());
      }
      if (const auto closest = closest_word(word, names)) {
        throw UsageError("'" + word + "' is neither a command nor a path (did you mean '" +
                             std::string(*closest) + "'?)",
                         tool_ + " --help");
      }
    }
  }
  const Command* command = find(default_command_);
  TESSERA_CHECK(command != nullptr);
  return *command;
}

void CommandLine::parse(const Command& command, std::vector<std::string> arguments) const {
  const std::string help_command =
      tool_ + (command.name().empty() ? "" : " " + command.name()) + " --help";
  CLI::App app;
  app.set_help_flag();
  for (const Command::Option& option : command.options()) add_option(app, option, help_command);
  std::vector<std::string> positionals;
  app.add_option("arguments", positionals);
  parse_arguments(app, std::move(arguments), help_command);
  for (std::string& positional : positionals) positional = as_given(std::move(positional));
  assign_positionals(command, positionals, help_command);
}

ExitCode CommandLine::run(int argc, const char* const* argv) {
  add_common_options();
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  for (std::string& argument : arguments) argument = object_store::keep_query(argument);
  const std::string first = arguments.empty() ? "" : arguments.front();
  if (first == "--version") {
    terminal_.print(tool_ + " " TESSERA_VERSION "\n");
    return ExitCode::done;
  }
  if (first == "--completion") {
    const std::string completion =
        arguments.size() == 2 ? completion_for(arguments[1], {tool_, commands_, default_command_})
                              : "";
    if (completion.empty()) {
      throw UsageError("--completion: expected bash, zsh or fish", tool_ + " --help");
    }
    terminal_.print(completion);
    return ExitCode::done;
  }
  if (first == "--man") {
    terminal_.print(man_page());
    return ExitCode::done;
  }
  if (first == "--help" || first == "-h") {
    terminal_.print(help());
    return ExitCode::done;
  }
  const Command& command = command_for(arguments);
  const auto options_end = std::find(arguments.begin(), arguments.end(), "--");
  if (std::any_of(arguments.begin(), options_end, [](const std::string& argument) {
        return argument == "--help" || argument == "-h";
      })) {
    terminal_.print(command.name().empty() ? help() : help(command));
    return ExitCode::done;
  }
  parse(command, std::move(arguments));
  if (!endpoint_.empty()) object_store::set_endpoint(endpoint_);
  return command.run();
}

std::string CommandLine::usage(const Command& command) const {
  std::string text = tool_;
  if (!command.name().empty()) text += " " + command.name();
  for (const Command::Argument& argument : command.arguments()) {
    text += argument.many != nullptr ? " [" + argument.name + "]" : " " + argument.name;
  }
  return text + " [OPTIONS]";
}

std::string CommandLine::help(const Command& command) const {
  const std::size_t width =
      std::min(static_cast<std::size_t>(std::max(terminal_.width(), 40)), kMaxHelpWidth);
  std::string text =
      "usage: " + usage(command) + "\n\n" + wrap(command.summary() + ".", width, 0) + "\n";
  for (const std::string& paragraph : command.description()) {
    text += "\n" + wrap(paragraph, width, 0) + "\n";
  }
  Section arguments("Arguments", width);
  for (const auto& argument : command.arguments()) arguments.add(argument.name, argument.help);
  Section options("Options", width);
  for (const auto& option : command.options()) options.add(option.with_placeholder(), option.help);
  options.add("--help", "Print this help");
  Section exit_codes("Exit codes", width);
  for (const auto& [code, meaning] : exit_code_meanings()) {
    exit_codes.add(std::to_string(static_cast<int>(code)), std::string(meaning));
  }
  text += arguments.text() + options.text();
  if (!command.examples().empty()) {
    text += "\nExamples\n";
    for (const auto& example : command.examples()) {
      text +=
          "  " + wrap(example.what, width - 2, 2) + "\n    " + tool_ + " " + example.line + "\n";
    }
  }
  return text + exit_codes.text();
}

std::string CommandLine::sections(std::size_t width) const {
  std::string text;
  for (const ExtraSection& extra : sections_) {
    Section section(extra.title, width);
    for (const auto& [name, meaning] : extra.rows) section.add(name, meaning);
    text += section.text();
  }
  return text;
}

std::string CommandLine::help() const {
  const std::size_t width =
      std::min(static_cast<std::size_t>(std::max(terminal_.width(), 40)), kMaxHelpWidth);
  if (const Command* tool = find("")) {
    std::string text = help(*tool);
    Section others("Other commands", width);
    for (const auto& command : commands_) {
      if (!command->name().empty()) others.add(usage(*command), command->summary());
    }
    return text + sections(width) + others.text();
  }
  std::string text = "usage: " + tool_ + " COMMAND ARGUMENTS... [OPTIONS]\n";
  if (const Command* command = find(default_command_)) {
    std::string short_usage = tool_;
    for (const auto& argument : command->arguments()) {
      short_usage += argument.many != nullptr ? " [" + argument.name + "]" : " " + argument.name;
    }
    text += "       " + short_usage + std::string(10, ' ') + "the same as '" + tool_ + " " +
            command->name() + "'\n";
  }
  text += "\n" + wrap(summary_ + ".", width, 0) + "\n";
  Section commands("Commands", width);
  for (const auto& command : commands_) commands.add(command->name(), command->summary());
  Section options("Options", width);
  options.add("--help", "Print this help; after a command, the help of that command");
  options.add("--version", "Print the version");
  options.add("--completion SHELL",
              "Print a completion script for bash, zsh or fish; load it with source");
  options.add("--man", "Print the manual page in roff format");
  Section exit_codes("Exit codes", width);
  for (const auto& [code, meaning] : exit_code_meanings()) {
    exit_codes.add(std::to_string(static_cast<int>(code)), std::string(meaning));
  }
  return text + commands.text() + options.text() + sections(width) + exit_codes.text();
}

std::string wrap(std::string_view text, std::size_t width, std::size_t indent) {
  std::string wrapped;
  std::size_t column = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    const std::size_t word_width = display_width(word);
    if (column > 0 && column + 1 + word_width > width) {
      wrapped += "\n" + std::string(indent, ' ');
      column = 0;
    } else if (column > 0) {
      wrapped += ' ';
      ++column;
    }
    wrapped += word;
    column += word_width;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return wrapped;
}

}  // namespace tessera::cli
