#pragma once

#include <string>

namespace tessera {

/// What the caller can do about an error or a finding. It is data, because each program words it
/// differently: `--units FILE` on a command line, `units=` in Python, PlanOptions::units in C++.
struct Remedy {
  enum class Action {
    none,
    resume_or_discard,  // the work that an interrupted run kept
    discard,            // that work
    give_units,         // the flat units that the source does not record
    give_flat_layout,   // the parameters in the flat vectors
    give_strategy,      // for tables that the table plan does not name
    leave_out,          // `argument`: a glob of the name
    allow_lossy,        // merge row-wise state by a weighted mean
    use_less_memory,    // smaller buffers, or fewer threads
    choose_source,      // which source's entry to take, or a prefix for its names
    rebuild_index,      // of a native checkpoint
  };

  Action action = Action::none;
  std::string argument{};

  explicit operator bool() const { return action != Action::none; }
  friend bool operator==(const Remedy&, const Remedy&) = default;
};

/// Returns the remedy in C++ terms, in a few words; empty for Action::none.
std::string remedy_to_string(const Remedy& remedy);

}  // namespace tessera
