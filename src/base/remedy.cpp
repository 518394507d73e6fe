
#include "tessera/base/error.h"

namespace tessera {

std::string remedy_to_string(const Remedy& remedy) {
  switch (remedy.action) {
    case Remedy::Action::none:
      return {};
    case Remedy::Action::resume_or_discard:
      return "resume or discard it with ckpt-reshard, or by JournalOptions::kept_work";
    case Remedy::Action::discard:
      return "discard it with ckpt-reshard, or by JournalOptions::kept_work";
    case Remedy::Action::give_units:
      return "PlanOptions::units names them";
    case Remedy::Action::give_flat_layout:
      return "OpenOptions::flat_layout_path names its parameters";
    case Remedy::Action::give_strategy:
      return "PlanOptions::strategy is for tables without a rule";
    case Remedy::Action::leave_out:
      return "'!" + remedy.argument + "' among the names leaves it out";
    case Remedy::Action::allow_lossy:
      return "`lossy` merges them by a weighted mean";
    case Remedy::Action::use_less_memory:
      return "ExecuteOptions: a smaller memory_nbytes, or fewer threads";
    case Remedy::Action::choose_source:
      return "MergePreference takes one, MergeSource::prefix keeps both";
    case Remedy::Action::rebuild_index:
      return "rebuild_native_index writes it anew";
  }
  TESSERA_CHECK(false && "unnamed Remedy::Action");
  return {};
}

}  // namespace tessera
