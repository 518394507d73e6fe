#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Returns the note that the exclusion `pattern` (`!GLOB`) matches no name.
inline formats::Finding note_of_unused_exclusion(ErrorWhere where, std::string rule,
                                                 std::string_view pattern) {
  return {formats::Finding::Severity::note, std::move(rule), std::move(where),
          "an exclusion that matches a name",
          "'" + printable(pattern) + "', which leaves nothing out"};
}

/// Adds the findings of a planner to its plan. Keeps views of plan and path, which must outlive it.
class PlanReport {
 public:
  PlanReport(Plan& plan, const std::string& source_path) : plan_(plan), source_path_(source_path) {}

  void problem(std::string rule, std::string fqn, std::string expected, std::string found,
               Remedy remedy = {}) {
    plan_.problems.push_back(finding(formats::Finding::Severity::error, std::move(rule),
                                     std::move(fqn), std::move(expected), std::move(found)));
    plan_.problems.back().remedy = std::move(remedy);
  }
  /// Reports a problem at a given place.
  void problem_at(ErrorWhere where, std::string rule, std::string expected, std::string found,
                  Remedy remedy = {}) {
    plan_.problems.push_back({formats::Finding::Severity::error, std::move(rule), std::move(where),
                              std::move(expected), std::move(found), std::move(remedy)});
  }
  void note(std::string rule, std::string fqn, std::string expected, std::string found,
            Remedy remedy = {}) {
    plan_.notes.push_back(finding(formats::Finding::Severity::note, std::move(rule), std::move(fqn),
                                  std::move(expected), std::move(found)));
    plan_.notes.back().remedy = std::move(remedy);
  }
  /// Adds a note about a given place.
  void note_at(ErrorWhere where, std::string rule, std::string expected, std::string found) {
    plan_.notes.push_back({formats::Finding::Severity::note, std::move(rule), std::move(where),
                           std::move(expected), std::move(found)});
  }
  void note_unused_exclusion(std::string rule, std::string_view pattern) {
    plan_.notes.push_back(
        note_of_unused_exclusion({source_path_, {}, {}}, std::move(rule), pattern));
  }
  /// Reports a problem, or only a note if `relaxation` allows it.
  void relaxable(Relaxation relaxation, std::string rule, std::string fqn, std::string expected,
                 std::string found, Remedy remedy = {}) {
    if (relaxation == Relaxation::allow) {
      note(std::move(rule), std::move(fqn), std::move(expected), std::move(found),
           std::move(remedy));
    } else {
      problem(std::move(rule), std::move(fqn), std::move(expected), std::move(found),
              std::move(remedy));
    }
  }

 private:
  formats::Finding finding(formats::Finding::Severity severity, std::string rule, std::string fqn,
                           std::string expected, std::string found) const {
    return {severity,
            std::move(rule),
            {source_path_, std::move(fqn), {}},
            std::move(expected),
            std::move(found)};
  }

  Plan& plan_;
  const std::string& source_path_;
};

/// Throws Error(invalid_argument). For options that contradict each other or do not fit the source.
[[noreturn]] inline void refuse_options(std::string_view rule, std::string_view expected,
                                        std::string_view found, Remedy remedy = {}) {
  throw Error::expected(ErrorKind::invalid_argument, {}, rule, expected, found, std::move(remedy));
}

}  // namespace tessera::reshard
