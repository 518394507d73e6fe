#include "cli/command_line_remedies.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

#include "base/utf8.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

/// Returns `!GLOB` as one word that bash, zsh and fish read alike: a name from a file must not be
/// able to run as a command. A backslash of the name becomes the set `[\]`, because fish reads two
/// backslashes between quotes as one. Characters that cannot be printed become `?`, which matches
/// any character.
std::string pasted_exclusion(std::string_view glob) {
  std::string word = "'!";
  bool has_unprintable = false;
  for (std::size_t i = 0; i < glob.size();) {
    const std::size_t nbytes = std::max<std::size_t>(detail::utf8_sequence_nbytes(glob, i), 1);
    const std::string_view character = glob.substr(i, nbytes);
    i += nbytes;
    if (character == "'") {
      word += "'\\''";
    } else if (character == "\\" && glob.substr(i).starts_with('\\')) {
      word += "[\\]";
      ++i;
    } else if (character == "\\" || printable(character) == character) {
      word += character;
    } else {
      word += '?';
      has_unprintable = true;
    }
  }
  return word + (has_unprintable ? "' (here ? is any character)" : "'");
}

}  // namespace

std::string command_line_remedy(const Remedy& remedy) {
  switch (remedy.action) {
    case Remedy::Action::none:
      return {};
    case Remedy::Action::resume_or_discard:
      return "ckpt-reshard --resume continues it, --discard starts from the beginning";
    case Remedy::Action::discard:
      return "ckpt-reshard --discard starts from the beginning";
    case Remedy::Action::give_units:
      return "give them with --units FILE";
    case Remedy::Action::give_flat_layout:
      return "give it with --flat-layout FILE";
    case Remedy::Action::give_strategy:
      return "give --strategy for tables that the plan does not name";
    case Remedy::Action::leave_out:
      return "to leave it out, add --only " + pasted_exclusion(remedy.argument);
    case Remedy::Action::allow_lossy:
      return "--allow-lossy merges them by a weighted mean";
    case Remedy::Action::allow_overflow:
      return "--on-overflow saturate or infinity moves it";
    case Remedy::Action::keep_dtype:
      return "--dequantize DTYPE turns codes into numbers; or move without --cast, or leave it out "
             "with --only " +
             pasted_exclusion(remedy.argument);
    case Remedy::Action::use_less_memory:
      return "try a smaller --memory or --threads";
    case Remedy::Action::choose_source:
      return "--prefer takes one of them; PREFIX=SRC keeps both";
    case Remedy::Action::rebuild_index:
      return "`ckpt-reshard rebuild-index` rebuilds it";
    case Remedy::Action::leave_extra_files:
      return "--extra-files leave copies none";
    case Remedy::Action::take_as_is:
      return "--as-is moves what is in it";
    case Remedy::Action::name_params:
      return "give the names with --optimizer-params FILE";
    case Remedy::Action::prefer_source:
      return "--prefer takes one of them";
    case Remedy::Action::drop_optimizer:
      return "--drop-optimizer leaves it out";
  }
  TESSERA_CHECK(false && "unnamed Remedy::Action");
  return {};
}

std::string finding_line(const formats::Finding& finding) {
  return formats::finding_to_error(finding).line_with(command_line_remedy(finding.remedy));
}

}  // namespace tessera::cli
