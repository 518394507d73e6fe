#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// How those who will read a message write options.
enum class OptionSpelling { command_line, python };

/// Returns an option as its readers write it: `--units FILE` or `units=FILE`; without an argument
/// `--allow-lossy` or `allow_lossy`. `name` is the command line's, without its dashes.
std::string spelled_option(std::string_view name, std::string_view argument,
                           OptionSpelling spelling);

/// Returns what is given to say yes: `--resume` or `resume=True`. `name` as above.
std::string spelled_flag(std::string_view name, OptionSpelling spelling);

/// Says what can be done about work that `ckpt-reshard` (or the Python package) has kept.
std::string kept_work_hint(OptionSpelling spelling);
/// Returns the half of it that always holds.
std::string discard_hint(OptionSpelling spelling);

}  // namespace tessera
