#include "reshard/quantized_names.h"

#include <cstddef>
#include <string>
#include <vector>

#include "formats/quantized_tensors.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::kCodesRole;
using formats::QuantizedPart;
using formats::QuantizedTensors;

/// How many weights have a problem, and the first of them in words.
struct Count {
  std::size_t number = 0;
  std::string first{};

  void add(const std::string& words) {
    if (number++ == 0) first = words;
  }
  std::string in_words() const {
    return number == 1 ? first : first + ", and " + std::to_string(number - 1) + " more";
  }
};

class SeparatedParts {
 public:
  SeparatedParts(const CheckpointContents& source, const QuantizedTensors& parts, const Plan& plan)
      : source_(source),
        parts_(parts),
        plan_(plan),
        moved_parts_(plan.destination),
        places_(source.tensors.size()) {
    for (std::size_t i = 0; i < plan.copies.size(); ++i) {
      places_[plan.copies[i].source_tensor].push_back(i);
    }
  }

  void find() {
    for (std::size_t i = 0; i < source_.tensors.size(); ++i) {
      const QuantizedPart* const part = parts_.find(i);
      if (part == nullptr || places_[i].empty()) continue;
      if (places_[part->partner].empty()) {
        left_out_.add(name_of(i) + ", " + parts_.in_words(*part));
      } else if (!is_recognised(i, *part)) {
        // Counts a pair of codes and scales once, at the codes. Counts each part that is not one of
        // such a pair by itself.
        const bool counts_as_scales =
            part->role != kCodesRole && parts_.find(part->partner)->partner == i;
        if (!counts_as_scales) renamed_.add(words_of_renamed(i, *part));
      }
    }
  }

  void tell(PlanReport& report) const {
    if (renamed_.number > 0) {
      report.note("quantized weights", "",
                  "names that show loaders which scales belong to which codes",
                  "names that do not belong together: " + renamed_.in_words());
    }
    if (left_out_.number > 0) {
      report.note("quantized weights", "", "codes and scales of a weight together",
                  "one without the other: " + left_out_.in_words());
    }
  }

 private:
  const std::string& name_of(std::size_t source_tensor) const {
    return source_.tensors[source_tensor].meta.fqn;
  }
  const std::string& new_name_of(std::size_t source_tensor) const {
    return plan_.destination.tensors[places_[source_tensor].front()].meta.fqn;
  }

  /// Returns whether a part has the same role under one of its new names. Codes and scales must
  /// also belong together as before. Other parts may belong to several weights.
  bool is_recognised(std::size_t source_tensor, const QuantizedPart& part) const {
    const bool is_of_pair =
        part.role == kCodesRole || parts_.find(part.partner)->partner == source_tensor;
    for (const std::size_t place : places_[source_tensor]) {
      const QuantizedPart* const moved = moved_parts_.find(place);
      if (moved == nullptr || moved->role != part.role) continue;
      if (!is_of_pair || plan_.copies[moved->partner].source_tensor == part.partner) return true;
    }
    return false;
  }

  std::string words_of_renamed(std::size_t source_tensor, const QuantizedPart& part) const {
    return printable(new_name_of(source_tensor)) + " (" + std::string(part.role) + " of " +
           std::string(part.scheme) + ") and " + printable(new_name_of(part.partner)) + " (" +
           std::string(part.role == kCodesRole ? "scales" : "codes") + ")";
  }

  const CheckpointContents& source_;
  const QuantizedTensors& parts_;
  const Plan& plan_;
  const QuantizedTensors moved_parts_;
  std::vector<std::vector<std::size_t>> places_;  // indices in the destination, by source tensor
  Count renamed_;
  Count left_out_;
};

}  // namespace

void note_separated_parts(const CheckpointContents& source, const Plan& plan, PlanReport& report) {
  const QuantizedTensors parts(source);
  if (parts.empty() || !plan.problems.empty()) return;
  SeparatedParts separated(source, parts, plan);
  separated.find();
  separated.tell(report);
}

}  // namespace tessera::reshard
