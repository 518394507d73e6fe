// Makes the manual page, in roff, from the texts of the help, which the functions
// add_<verb>_command set.
#include <string>
#include <string_view>

#include "cli/command_line.h"
#include "cli/exit_code.h"

namespace tessera::cli {
namespace {

std::string roff(std::string_view text) {
  std::string escaped;
  for (char c : text) {
    if (c == '\\') {
      escaped += "\\e";
    } else if (c == '-') {
      escaped += "\\-";
    } else {
      escaped += c;
    }
  }
  if (escaped.starts_with('.') || escaped.starts_with('\'')) escaped.insert(0, "\\&");
  return escaped;
}

}  // namespace

std::string CommandLine::man_page() const {
  std::string text = ".TH " + tool_ + " 1 \"\" \"Tessera " TESSERA_VERSION "\"\n";
  text += ".SH NAME\n" + roff(tool_) + " \\- " + roff(summary_) + "\n.SH SYNOPSIS\n";
  for (const auto& command : commands_) text += ".B " + roff(usage(*command)) + "\n.br\n";
  for (const auto& command : commands_) {
    text += ".SH " + roff(command->name().empty() ? "DESCRIPTION" : usage(*command)) + "\n" +
            roff(command->summary()) + ".\n";
    for (const auto& paragraph : command->description()) text += ".PP\n" + roff(paragraph) + "\n";
    for (const auto& argument : command->arguments()) {
      text += ".TP\n.I " + roff(argument.name) + "\n" + roff(argument.help) + "\n";
    }
    for (const auto& option : command->options()) {
      text += ".TP\n.B " + roff(option.with_placeholder()) + "\n" + roff(option.help) + "\n";
    }
    for (const auto& example : command->examples()) {
      text += ".PP\n" + roff(example.what) + "\n.PP\n.RS\n.nf\n" +
              roff(tool_ + " " + example.line) + "\n.fi\n.RE\n";
    }
  }
  for (const ExtraSection& extra : sections_) {
    text += ".SH " + roff(extra.title) + "\n";
    for (const auto& [name, meaning] : extra.rows) {
      text += ".TP\n.B " + roff(name) + "\n" + roff(meaning) + "\n";
    }
  }
  text += ".SH EXIT STATUS\n";
  for (const auto& [code, meaning] : exit_code_meanings()) {
    text += ".TP\n.B " + std::to_string(static_cast<int>(code)) + "\n" + roff(meaning) + "\n";
  }
  return text;
}

}  // namespace tessera::cli
