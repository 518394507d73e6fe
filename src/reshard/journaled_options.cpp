#include "reshard/journaled_options.h"

#include <span>
#include <string_view>

#include "base/digest.h"
#include "reshard/optimizer_params.h"

namespace tessera::reshard {
namespace {

std::string digest_of(const std::string& text) {
  Xxh3Wide hash;
  hash.update(std::as_bytes(std::span(text)));
  return "a file of digest " + hash.hex_digest();
}

std::string file_of(const std::string& text) {
  return text.empty() ? text : digest_of(text);
}

std::string joined(const std::vector<std::string>& texts) {
  std::string text;
  for (const std::string& each : texts) text += (text.empty() ? "" : " ") + each;
  return text;
}

std::string_view preference_name(formats::MergePreference preference) {
  switch (preference) {
    case formats::MergePreference::none:
      return "";
    case formats::MergePreference::first:
      return "first";
    case formats::MergePreference::last:
      return "last";
  }
  return "";
}

class Explanation {
 public:
  void add(std::string_view option, std::string_view text) {
    add_argument(std::string(option), text);
  }
  void add_argument(const std::string& name, std::string_view text) {
    identity_[formats::kPlanExplanation + name] = text.empty() ? "none" : text;
  }
  /// Adds an option that may change elements even if the plan stays equal. A resume always compares
  /// it.
  void add_content(std::string_view option, const std::string& text) {
    add(option, text);
    if (!text.empty()) identity_[std::string(option)] = text;
  }
  void add_flag(std::string_view option, bool is_given) { add(option, is_given ? "given" : ""); }
  void add_file(std::string_view option, const std::string& text) { add(option, file_of(text)); }
  void add_list(std::string_view option, const std::vector<std::string>& texts) {
    add(option, joined(texts));
  }
  formats::ResumeIdentity take() { return std::move(identity_); }

 private:
  formats::ResumeIdentity identity_;
};

}  // namespace

std::string layout_digest(const formats::CheckpointContents& contents) {
  Xxh3Wide hash;
  const auto add = [&](const std::string& text) {
    hash.update(std::as_bytes(std::span(text)));
    hash.update(std::as_bytes(std::span("\n", 1)));
  };
  add(std::to_string(contents.world_size));
  for (const formats::TensorEntry& tensor : contents.tensors) {
    add(tensor.meta.fqn);
    add(shape_to_string(tensor.meta.shape));
    for (const formats::Piece& piece : tensor.pieces) {
      add(region_to_string(piece.region) + " " + std::to_string(piece.rank));
    }
  }
  return hash.hex_digest();
}

formats::ResumeIdentity identity_of_options(const JournaledOptions& given) {
  std::vector<std::string> renames;
  for (const Rename& rename : given.renames) renames.push_back(rename.from + "=" + rename.to);
  std::vector<std::string> prefixes;
  for (const Rename& removal : given.prefix_removals) prefixes.push_back(removal.from);
  std::vector<std::string> sources;
  for (const std::string& prefix : given.source_prefixes) sources.push_back(prefix + "=");
  Explanation explanation;
  explanation.add("world-size", given.world_size == 0 ? "" : std::to_string(given.world_size));
  explanation.add("strategy", given.strategy);
  explanation.add_file("plan", given.table_plan);
  explanation.add_file("mesh", given.mesh);
  explanation.add("like", given.like.empty() ? "" : "a layout of digest " + given.like);
  explanation.add_file("units", given.units);
  explanation.add_content("flat-layout", file_of(given.flat_layout));
  explanation.add_list("as-dict", given.as_dict);
  const bool is_numbers = given.optimizer_params == kParamsAsNumbers;
  const std::string_view word = is_numbers ? kParamsAsNumbers : kAutomaticParams;
  if (given.optimizer_params.empty() || given.optimizer_params == word) {
    explanation.add("optimizer-params", given.optimizer_params);
  } else {  // the plan has the names, but not which state gets which
    explanation.add_content("optimizer-params", file_of(given.optimizer_params));
  }
  explanation.add_content("recipe", file_of(given.recipe));
  explanation.add_content("inverse", given.inverse ? "given" : "");
  explanation.add_content("set", joined(given.set));
  explanation.add_list("only", given.only);
  explanation.add_list("rename", renames);
  explanation.add_list("prefix", prefixes);
  explanation.add_argument("sources", joined(sources));
  explanation.add_content("prefer", std::string(preference_name(given.preference)));
  explanation.add("cast", given.cast ? dtype_name(*given.cast) : "");
  explanation.add("on-overflow", on_overflow_name(given.on_overflow));
  explanation.add("optimizer-names", optimizer_names_name(given.optimizer_names));
  explanation.add_flag("drop-optimizer", given.drop_optimizer);
  explanation.add_flag("allow-missing", given.allow_missing);
  explanation.add_flag("allow-lossy", given.allow_lossy);
  explanation.add_flag("as-is", given.as_is);
  return explanation.take();
}

}  // namespace tessera::reshard
