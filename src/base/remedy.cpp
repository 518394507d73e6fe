
#include "tessera/base/error.h"

namespace tessera {

std::string remedy_to_string(const Remedy& remedy) {
  switch (remedy.action) {
    case Remedy::Action::none:
      return {};
    case Remedy::Action::resume_or_discard:
      return "resume or discard it with ckpt-reshard, or with JournalOptions::kept_work";
    case Remedy::Action::discard:
      return "discard it with ckpt-reshard, or with JournalOptions::kept_work";
    case Remedy::Action::give_units:
      return "give them with PlanOptions::units";
    case Remedy::Action::give_flat_layout:
      return "give it with OpenOptions::flat_layout_path";
    case Remedy::Action::give_strategy:
      return "set PlanOptions::strategy for tables without a rule";
    case Remedy::Action::leave_out:
      return "to leave it out, add '!" + remedy.argument + "' to the names";
    case Remedy::Action::allow_lossy:
      return "the option `lossy` merges them by a weighted mean";
    case Remedy::Action::allow_overflow:
      return "PlanOptions::on_overflow allows it";
    case Remedy::Action::keep_dtype:
      return "move it without PlanOptions::cast; to leave it out, add '!" + remedy.argument +
             "' to the names";
    case Remedy::Action::use_less_memory:
      return "set a smaller ExecuteOptions::memory_nbytes, or fewer threads";
    case Remedy::Action::choose_source:
      return "MergePreference takes one of them; MergeSource::prefix keeps both";
    case Remedy::Action::rebuild_index:
      return "rebuild_native_index rebuilds it";
    case Remedy::Action::leave_extra_files:
      return "ExtraFilesPolicy::leave copies none";
    case Remedy::Action::take_as_is:
      return "PlanOptions::part = Relaxation::allow moves what is in it";
    case Remedy::Action::name_params:
      return "give the names with OptimizerParams::names";
    case Remedy::Action::prefer_source:
      return "MergePreference takes one of them";
    case Remedy::Action::drop_optimizer:
      return "OptimizerSelection::leave_out leaves it out";
  }
  TESSERA_CHECK(false && "unnamed Remedy::Action");
  return {};
}

}  // namespace tessera
