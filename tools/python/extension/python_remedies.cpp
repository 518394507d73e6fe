#include "python_remedies.h"

#include <nanobind/stl/string.h>

#include "python_value.h"
#include "tessera/base/error.h"

namespace tessera::python {
namespace {

/// Returns `!GLOB` as Python's repr of a str spells it.
std::string python_exclusion(const std::string& glob) {
  return nb::cast<std::string>(nb::repr(text_to_python("!" + glob)));
}

}  // namespace

std::string python_remedy(const Remedy& remedy) {
  switch (remedy.action) {
    case Remedy::Action::none:
      return {};
    case Remedy::Action::resume_or_discard:
      return "resume=True continues it, discard=True starts from the beginning";
    case Remedy::Action::discard:
      return "discard=True starts from the beginning";
    case Remedy::Action::give_units:
      return "give them with units=FILE";
    case Remedy::Action::give_flat_layout:
      return "give it with flat_layout=FILE";
    case Remedy::Action::give_strategy:
      return "give strategy for tables that the plan does not name";
    case Remedy::Action::leave_out:
      return "to leave it out, add only=" + python_exclusion(remedy.argument);
    case Remedy::Action::allow_lossy:
      return "allow_lossy=True merges them by a weighted mean";
    case Remedy::Action::allow_overflow:
      return "tessera.reshard moves it with on_overflow='saturate' or 'infinity'";
    case Remedy::Action::keep_dtype:
      return "move without cast, or leave it out with only=" + python_exclusion(remedy.argument);
    case Remedy::Action::use_less_memory:
      return "set a smaller memory, or fewer threads";
    case Remedy::Action::choose_source:
      return "prefer takes one of them; {PREFIX: SRC} keeps both";
    case Remedy::Action::rebuild_index:
      return "`ckpt-reshard rebuild-index` rebuilds it";
    case Remedy::Action::leave_extra_files:
      return "extra_files='leave' copies none";
    case Remedy::Action::take_as_is:
      return "as_is=True moves what is in it";
    case Remedy::Action::name_params:
      return "give the names with optimizer_params=FILE";
    case Remedy::Action::prefer_source:
      return "prefer takes one of them";
    case Remedy::Action::drop_optimizer:
      return "drop_optimizer=True leaves it out";
  }
  TESSERA_CHECK(false && "unnamed Remedy::Action");
  return {};
}

std::string python_remedy_of_load(const Remedy& remedy) {
  if (remedy.action != Remedy::Action::allow_lossy) return python_remedy(remedy);
  return "tessera.reshard with allow_lossy=True makes a checkpoint that fits, by a weighted mean";
}

}  // namespace tessera::python
