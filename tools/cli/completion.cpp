#include "cli/completion.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace tessera::cli {
namespace {

constexpr std::string_view kHelpOption = "--help";
constexpr std::string_view kHelpOfHelp = "Print the help of the command";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

/// Returns the spellings of an option: `-o` and `--output` for `-o,--output`.
std::vector<std::string> spellings(const Command::Option& option) {
  const std::size_t comma = option.name.find(',');
  if (comma == std::string::npos) return {option.name};
  return {option.name.substr(0, comma), option.name.substr(comma + 1)};
}

std::string function_name(const std::string& tool) {
  std::string name = "_" + tool;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<std::string> verbs(const CompletedTool& tool) {
  std::vector<std::string> names;
  for (const auto& command : tool.commands) {
    if (!command->name().empty()) names.push_back(command->name());
  }
  return names;
}

std::string with_backslashes(std::string_view text, std::string_view before) {
  std::string result;
  for (const char c : text) {
    if (before.find(c) != std::string_view::npos) result += '\\';
    result += c;
  }
  return result;
}

// --- bash

/// Returns the branch of bash's `case` that completes words after a verb.
std::string bash_case(const Command& command, const std::string& pattern) {
  std::string options(kHelpOption);
  std::string values;
  for (const auto& option : command.options()) {
    options += " " + joined(spellings(option));
    if (option.choices.empty()) continue;
    values += "        " + option.name + ") words='" + joined(option.choices) + "' ;;\n";
  }
  return "    " + pattern + ")\n      options='" + options + "'\n      case $previous in\n" +
         values + "      esac ;;\n";
}

std::string bash_completion(const CompletedTool& tool) {
  const std::string function = function_name(tool.name);
  std::string cases;
  std::string fallback;  // the branch for any other word, `*`, which must be the last one
  for (const auto& command : tool.commands) {
    if (command->name() == tool.default_command) {
      fallback = bash_case(*command, "*");
    } else {
      cases += bash_case(*command, command->name());
    }
  }
  return "# Completion of " + tool.name +
         " for bash. Source this, or put it where bash-completion looks.\n" + function +
         "() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
         "  local options words=\n"
         "  case ${COMP_WORDS[1]} in\n" +
         cases + fallback +
         "  esac\n"
         "  COMPREPLY=()\n"
         "  if [[ $words ]]; then\n"
         "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
         "  elif [[ $current == -* ]]; then\n"
         "    mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$current\")\n"
         "  elif ((COMP_CWORD == 1)); then\n"
         "    mapfile -t COMPREPLY < <(compgen -W '" +
         joined(verbs(tool)) +
         "' -- \"$current\"; compgen -f -- \"$current\")\n"
         "  else\n"
         "    mapfile -t COMPREPLY < <(compgen -f -- \"$current\")\n"
         "  fi\n"
         "}\n"
         "complete -o filenames -F " +
         function + " " + tool.name + "\n";
}

// --- zsh

std::string zsh_quoted(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'') result += "'\\'";
    result += c;
  }
  return result + "'";
}

/// Returns an option for `_arguments`: `*--to[Format of DST]:FORMAT:(native dcp)`.
std::string zsh_option(const std::string& name, std::string_view help, const std::string& value) {
  // A bracket would end the explanation.
  const std::string explanation = with_backslashes(help, "[]\\");
  return "        " + zsh_quoted("*" + name + "[" + explanation + "]" + value) + " \\\n";
}

std::string zsh_case(const Command& command) {
  std::string text = "    " + zsh_quoted(command.name()) + ")\n      _arguments \\\n";
  text += zsh_option(std::string(kHelpOption), kHelpOfHelp, "");
  for (const auto& option : command.options()) {
    std::string value;
    if (!option.placeholder.empty()) {
      value = ":" + option.placeholder + ":" +
              (option.choices.empty() ? "_files" : "(" + joined(option.choices) + ")");
    }
    for (const std::string& name : spellings(option)) text += zsh_option(name, option.help, value);
  }
  return text + "        '*:file:_files' ;;\n";
}

std::string zsh_completion(const CompletedTool& tool) {
  const std::string function = function_name(tool.name);
  std::string commands;
  std::string cases;
  for (const auto& command : tool.commands) {
    if (!command->name().empty()) {
      commands += "    " + zsh_quoted(command->name() + ":" + command->summary()) + "\n";
    }
    cases += zsh_case(*command);
  }
  return "#compdef " + tool.name + "\n# Completion of " + tool.name +
         " for zsh. Source this after compinit, or put it into a folder of $fpath\n"
         "# as _" +
         tool.name + ".\n" + function +
         "() {\n"
         "  local -a commands\n"
         "  commands=(\n" +
         commands +
         "  )\n"
         "  if ((CURRENT == 2)) && [[ $PREFIX != -* ]]; then\n"
         "    _describe command commands\n"
         "    _files\n"
         "    return\n"
         "  fi\n"
         "  local verb=" +
         zsh_quoted(tool.default_command) +
         "\n"
         "  if ((CURRENT > 2 && $commands[(I)$words[2]:*])); then\n"
         "    verb=$words[2]\n"
         "    shift words\n"
         "    ((CURRENT--))\n"
         "  fi\n"
         "  case $verb in\n" +
         cases +
         "  esac\n"
         "}\n"
         "if [[ $funcstack[1] == _" +
         tool.name + " ]]; then\n  " + function + " \"$@\"\nelse\n  compdef " + function + " " +
         tool.name + "\nfi\n";
}

// --- fish

std::string fish_quoted(std::string_view text) {
  return "'" + with_backslashes(text, "'\\") + "'";
}

std::string fish_option(const Command::Option& option) {
  std::string text;
  for (const std::string& name : spellings(option)) {
    text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  if (!option.choices.empty()) {
    text += " -x -a " + fish_quoted(joined(option.choices));
  } else if (!option.placeholder.empty()) {
    text += " -r";
  }
  return text + " -d " + fish_quoted(option.help);
}

std::string fish_completion(const CompletedTool& tool) {
  const std::string complete = "complete -c " + tool.name;
  std::string text = "# Completion of " + tool.name +
                     " for fish. Source this, or put it into a folder of $fish_complete_path.\n";
  for (const auto& command : tool.commands) {
    const bool is_default = command->name() == tool.default_command;
    if (!command->name().empty()) {
      text += complete + " -n __fish_use_subcommand -a " + command->name() + " -d " +
              fish_quoted(command->summary()) + "\n";
    }
    std::vector<std::string> others = verbs(tool);
    std::erase(others, command->name());
    const std::string condition = is_default ? "not __fish_seen_subcommand_from " + joined(others)
                                             : "__fish_seen_subcommand_from " + command->name();
    for (const auto& option : command->options()) {
      text += complete + " -n " + fish_quoted(condition) + fish_option(option) + "\n";
    }
  }
  return text + complete + " -l " + std::string(kHelpOption.substr(2)) + " -d " +
         fish_quoted(kHelpOfHelp) + "\n";
}

}  // namespace

std::string completion_for(const std::string& shell, const CompletedTool& tool) {
  if (shell == "bash") return bash_completion(tool);
  if (shell == "zsh") return zsh_completion(tool);
  if (shell == "fish") return fish_completion(tool);
  return {};
}

}  // namespace tessera::cli
