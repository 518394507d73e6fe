#include "arithmetic/combination.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "arithmetic/adapter_targets.h"
#include "arithmetic/combined_reader.h"
#include "arithmetic/element_sum.h"
#include "arithmetic/source_match.h"
#include "arithmetic/tied_embeddings.h"
#include "base/outside_failure.h"
#include "base/value_bits.h"
#include "formats/key_paths.h"
#include "formats/own_annotations.h"
#include "formats/per_rank.h"
#include "reshard/cast_rule.h"
#include "reshard/moved_names.h"
#include "reshard/optimizer_rules.h"
#include "tessera/base/error.h"

namespace tessera::arithmetic {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::Finding;
using formats::MergePreference;
using formats::TensorEntry;
using inspect::TensorReader;

/// Whether one of `names` is `name`, or is inside or around it, as `m.s` is inside `m`.
bool has_in_place_of(std::string_view name, const std::set<std::string_view>& names) {
  const std::string start = std::string(name) + ".";
  const auto inner = names.lower_bound(start);
  if (inner != names.end() && inner->starts_with(start)) return true;
  while (!names.contains(name)) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string_view::npos) return false;
    name = name.substr(0, dot);
  }
  return true;
}

/// Plans a combination of opened readers: a weighted sum of the sources, then merged adapters.
/// `make` moves the readers into one that adds up elements when they are read. Call it once.
class Combination {
 public:
  Combination(std::vector<WeightedReader> sources, std::vector<LoraAdapter> adapters,
              const CombineOptions& options)
      : adapters_(std::move(adapters)), options_(std::make_unique<CombineOptions>(options)) {
    TESSERA_CHECK(!sources.empty());
    for (WeightedReader& source : sources) {
      entries_.emplace_back(source.reader->contents(), options.selection);
      steps_.push_back(source.step);
      quantization_methods_.push_back(source.quantization_method);
      readers_.push_back(source.reader.get());
      sources_.push_back(std::move(source.reader));
    }
    contents_ = readers_.front()->contents();
    origins_.resize(contents_.tensors.size());  // all begin as AsInFirst
  }

  CombinedCheckpoint make() {
    problems_ = match_sources(readers_, entries_, quantization_methods_, options_->selection);
    if (!is_copy()) {
      for (std::size_t s = 0; s < readers_.size(); ++s) {
        const auto adapter = find_adapter(*readers_[s], entries_[s]);
        if (!adapter) continue;
        if (adapter->severity == Finding::Severity::error) {
          problems_.push_back(*adapter);
        } else if (s == 0) {  // the other sources have the same names
          contents_.opening_findings.push_back(*adapter);
        }
      }
      const auto without_sum = find_floats_without_sum(*readers_.front(), entries_.front());
      problems_.insert(problems_.end(), without_sum.begin(), without_sum.end());
    }
    counts_.num_sources = readers_.size();
    roles_ = reshard::classify_state(contents_);
    cast_rule_.emplace(contents_, roles_);
    const std::set<std::size_t> refused = tensors_with_problems();
    for (const auto& [name, index] : entries_.front().tensors()) {
      if (!refused.contains(index)) add_tensor(name, index);
    }
    add_adapters();
    for (std::size_t i = 0; i < contents_.values.size(); ++i) add_value(i);
    if (options_->preference == MergePreference::last) take_values_of_last();
    note_values_left();
    note_preferred();
    note_left_out();
    note_texts_left();
    note_second_names_left();
    note_rest_of_adapters();
    add_findings_of_others();
    count();
    sort_problems();
    auto reader = std::make_unique<CombinedReader>(std::move(sources_), std::move(adapters_),
                                                   std::move(options_), std::move(contents_),
                                                   std::move(origins_), std::move(values_));
    return {std::move(reader), std::move(problems_), std::move(counts_), std::move(widened_)};
  }

 private:
  /// Whether the result, before adapters are added, is a copy of the only source: there is one
  /// source, its weight is 1, and the divisor is 1.
  bool is_copy() const {
    return steps_.size() == 1 && steps_.front().weight == 1.0 && options_->divisor == 1.0;
  }

  std::set<std::size_t> tensors_with_problems() const {
    std::set<std::size_t> refused;
    for (const Finding& problem : problems_) {
      const auto index = entries_.front().find_tensor(problem.where.fqn);
      if (index) refused.insert(*index);
    }
    return refused;
  }

  /// Opens a tensor of a source, so that any part of it can be read. If pieces are missing, returns
  /// nothing and reports a problem. Does not report missing pieces of the first source, because the
  /// move itself reports these.
  std::optional<TensorReader> open(std::size_t source, std::size_t index) {
    try {
      return TensorReader(*readers_[source], index);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corruption) throw;
      if (source > 0) {
        problems_.push_back(
            combine_problem(readers_[source]->contents().tensors[index].meta.fqn,
                            "a whole tensor in " + printable(readers_[source]->path()),
                            std::string(error.reason())));
      }
      return std::nullopt;
    }
  }

  /// Opens the tensor `name` in each source, and returns one reader for each source. Returns an
  /// empty list if a source lacks some of the tensor's elements.
  std::vector<TensorReader> open_in_all(const std::string& name) {
    std::vector<TensorReader> tensors;
    for (std::size_t s = 0; s < readers_.size(); ++s) {
      auto tensor = open(s, *entries_[s].find_tensor_of_rank(name));
      if (tensor) tensors.push_back(std::move(*tensor));
    }
    if (tensors.size() != readers_.size()) tensors.clear();
    return tensors;
  }

  void add_tensor(const std::string& name, std::size_t index) {
    std::vector<TensorReader> tensors = open_in_all(name);
    if (tensors.empty()) return;
    TensorMeta& meta = contents_.tensors[index].meta;
    if (!can_be_summed(meta.dtype)) {
      return take_tensor(name, index, std::move(tensors),
                         std::string(dtype_name(meta.dtype)) + " tensors cannot be added up");
    }
    if (cast_rule_->is_of_trainer(index)) {
      return take_tensor(name, index, std::move(tensors), "state of the trainer is not added up");
    }
    TensorSum sum(meta, *options_);
    for (std::size_t s = 0; s < tensors.size(); ++s) sum.add({std::move(tensors[s]), steps_[s]});
    origins_[index].emplace<TensorSum>(std::move(sum));
    if (options_->rounding == Rounding::later && !is_complex(meta.dtype) && is_cast(index)) {
      widened_.insert(meta.dtype);
      meta.dtype = DType::float64;
    }
  }

  bool is_cast(std::size_t index) const {
    const reshard::CastVerdict verdict = cast_rule_->verdict_of(index);
    return verdict != reshard::CastVerdict::keep && verdict != reshard::CastVerdict::keep_outside;
  }

  /// Takes a tensor that is not added up, such as one of integers, from one source. Reports a
  /// problem if the sources have different dtypes or elements and there is no preference. `reason`
  /// says why there is no sum.
  void take_tensor(const std::string& name, std::size_t index, std::vector<TensorReader> tensors,
                   const std::string& reason) {
    bool have_one_dtype = true;
    bool are_equal = true;
    for (std::size_t s = 1; s < tensors.size() && are_equal; ++s) {
      have_one_dtype = tensors.front().meta().dtype == tensors[s].meta().dtype;
      are_equal = have_one_dtype && have_equal_elements(tensors.front(), tensors[s]);
    }
    if (!are_equal && options_->preference == MergePreference::none) {
      problems_.push_back(
          combine_problem(name, "equal elements in all sources, because " + reason,
                          have_one_dtype ? "different elements" : "different dtypes",
                          {Remedy::Action::prefer_source}));
    }
    if (!are_equal) preferred_.push_back(name);
    const bool is_last = options_->preference == MergePreference::last;
    TensorReader& taken = is_last ? tensors.back() : tensors.front();
    contents_.tensors[index].meta.dtype = taken.meta().dtype;
    origins_[index].emplace<TensorReader>(std::move(taken));
  }

  void add_value(std::size_t index) {
    values_.push_back({0, index});
    const std::string& name = contents_.values[index].name;
    if (!entries_.front().find_value(name)) return;
    bool are_equal = true;
    for (std::size_t s = 1; s < readers_.size(); ++s) {
      const auto other = entries_[s].find_value(name);
      are_equal = are_equal && other && have_equal_values(index, s, *other);
      if (other && options_->preference == MergePreference::last) values_.back() = {s, *other};
    }
    if (are_equal) return;
    preferred_.push_back(name);
    if (options_->preference != MergePreference::none) return;
    problems_.push_back(combine_problem(name, "the same value in all sources",
                                        "different values, or a source without this value",
                                        {Remedy::Action::prefer_source}));
  }

  /// Whether two sources have equal values. A damaged value equals no other. Throws: Error(io).
  bool have_equal_values(std::size_t index, std::size_t source, std::size_t other) const {
    try {
      return tessera::detail::have_equal_bits(readers_.front()->read_value(index),
                                              readers_[source]->read_value(other));
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      return false;
    }
  }

  /// Adds the values that the last source has and the first lacks. Removes values that cannot be
  /// beside those of the last source: what is inside or around one of them, and the value that one
  /// rank has in place of a shared entry, or of entries inside or around it, if the last source has
  /// only the shared ones. Otherwise the state of that rank would be from another run.
  void take_values_of_last() {
    const std::size_t last = readers_.size() - 1;
    const CheckpointContents& source = readers_[last]->contents();
    std::set<std::string_view> added;
    std::set<std::string_view> of_last;
    for (const auto& [name, index] : entries_[last].values()) {
      of_last.insert(name);
      if (!entries_.front().find_value(name)) added.insert(name);
    }
    for (const auto& [name, index] : entries_[last].tensors()) of_last.insert(name);
    const auto is_replaced = [&](const std::string& name) {
      if (entries_[last].find_value(name) || !entries_.front().find_value(name)) return false;
      const auto own = formats::parse_per_rank_name(name);
      return (own && has_in_place_of(own->name, of_last)) || has_in_place_of(name, added);
    };
    std::vector<std::pair<formats::ValueEntry, ValueOrigin>> values;
    for (std::size_t i = 0; i < contents_.values.size(); ++i) {
      if (is_replaced(contents_.values[i].name)) continue;
      values.emplace_back(std::move(contents_.values[i]), values_[i]);
    }
    for (const std::string_view name : added) {
      const std::size_t index = *entries_[last].find_value(name);
      values.emplace_back(source.values[index], ValueOrigin{last, index});
    }
    std::ranges::sort(values, {},
                      [](const auto& value) -> const std::string& { return value.first.name; });
    contents_.values.clear();
    values_.clear();
    for (auto& [value, origin] : values) {
      contents_.values.push_back(std::move(value));
      values_.push_back(origin);
    }
    for (const formats::Simplification& each : source.simplifications) {
      if (added.contains(each.name)) contents_.simplifications.push_back(each);
    }
    check_tree();
  }

  /// Reports names that cannot be in one tree, such as a list in one source that is a dict in
  /// another.
  void check_tree() {
    try {
      formats::check_key_paths(contents_, "");
    } catch (const Error& wrong) {
      problems_.push_back(combine_problem(wrong.where().fqn, "names that fit into one nested dict",
                                          std::string(wrong.reason())));
    }
  }

  /// Reports the values that the first source lacks: as problems, or in a note if there is a
  /// preference. The result has them only if the last source has them and is preferred.
  void note_values_left() {
    std::set<std::string> left;
    for (std::size_t s = 1; s < readers_.size(); ++s) {
      for (const auto& [name, index] : entries_[s].values()) {
        if (!entries_.front().find_value(name)) left.insert(name);
      }
    }
    for (const std::string& name : left) {
      if (options_->preference != MergePreference::none) {
        const bool is_taken = options_->preference == MergePreference::last &&
                              entries_.back().find_value(name).has_value();
        (is_taken ? preferred_ : left_out_).push_back(name);
      } else {
        problems_.push_back(combine_problem(name, "the same value in all sources",
                                            "none in " + printable(readers_.front()->path()),
                                            {Remedy::Action::prefer_source}));
      }
    }
  }

  /// Adds a note about `num` names. `found` ends with one of them, in quotes.
  void add_note(std::string expected, std::string found, std::size_t num) {
    if (num > 1) found += " and " + std::to_string(num - 1) + " more";
    contents_.opening_findings.push_back({.severity = Finding::Severity::note,
                                          .rule = kCombineRule,
                                          .where = {.path = readers_.front()->path()},
                                          .expected = std::move(expected),
                                          .found = std::move(found)});
  }

  /// Adds a note about the values that only other sources than the first and the preferred one
  /// have.
  void note_left_out() {
    if (left_out_.empty()) return;
    add_note("each value in the preferred source",
             "values that only other sources have, which are left out: '" +
                 printable(left_out_.front()) + "'",
             left_out_.size());
  }

  /// Adds a note about everything that a preference decided.
  void note_preferred() {
    if (preferred_.empty() || options_->preference == MergePreference::none) return;
    add_note("equal values, integers and state of the trainer in all sources",
             "different entries (the preferred source's entry is taken): '" +
                 printable(preferred_.front()) + "'",
             preferred_.size());
  }

  /// Whether nothing is lost if the result does not take this annotation of another source: the
  /// result has it too, or it is one of Tessera's own.
  bool keeps_text(const std::string& key, const std::string& text) const {
    const auto kept = contents_.annotations.find(key);
    return (kept != contents_.annotations.end() && kept->second == text) ||
           formats::is_own_annotation(key, text);
  }

  /// Adds a note about annotations that later sources have and the first source lacks, or has with
  /// another text. The result does not have these annotations.
  void note_texts_left() {
    std::set<std::string> left;
    for (std::size_t s = 1; s < readers_.size(); ++s) {
      for (const auto& [key, text] : readers_[s]->contents().annotations) {
        if (!keeps_text(key, text)) left.insert(key);
      }
    }
    if (left.empty()) return;
    add_note("the same annotations in all sources",
             "other annotations in later sources (left out): '" + printable(*left.begin()) + "'",
             left.size());
  }

  /// Adds a note about second names of tied tensors that the first source lacks. The result has the
  /// names of the first source.
  void note_second_names_left() {
    std::set<std::string> left;
    for (std::size_t s = 1; s < readers_.size(); ++s) {
      for (const auto& [name, tensor] : entries_[s].aliases()) {
        if (!entries_.front().find_tensor_of_rank(name)) left.insert(name);
      }
    }
    if (left.empty()) return;
    add_note("the names of all sources in " + printable(readers_.front()->path()),
             "second names of tied tensors in later sources (left out): '" +
                 printable(*left.begin()) + "'",
             left.size());
  }

  /// Adds a note about the values and annotations of each adapter. The result does not have them.
  void note_rest_of_adapters() {
    for (const LoraAdapter& adapter : adapters_) {
      const CheckpointContents& contents = adapter.reader->contents();
      std::set<std::string> left;
      for (const formats::ValueEntry& value : contents.values) left.insert(value.name);
      for (const auto& [key, text] : contents.annotations) {
        if (!keeps_text(key, text)) left.insert(key);
      }
      if (left.empty()) continue;
      add_note("only tensors in an adapter",
               "values or annotations in " + printable(adapter.reader->path()) +
                   ", which are left out: '" + printable(*left.begin()) + "'",
               left.size());
    }
  }

  /// Adds what opening the later sources and the adapters found.
  void add_findings_of_others() {
    const auto add = [&](const CheckpointContents& other) {
      contents_.opening_findings.insert(contents_.opening_findings.end(),
                                        other.opening_findings.begin(),
                                        other.opening_findings.end());
      if (!contents_.part) contents_.part = other.part;
    };
    for (std::size_t s = 1; s < readers_.size(); ++s) add(readers_[s]->contents());
    for (const LoraAdapter& adapter : adapters_) add(adapter.reader->contents());
  }

  void add_adapters() {
    std::set<std::size_t> changed;
    for (LoraAdapter& adapter : adapters_) {
      AdapterTargets targets(*readers_.front(), entries_.front(), adapter, *options_);
      targets.add_to(origins_, replaced_);
      problems_.insert(problems_.end(), targets.problems().begin(), targets.problems().end());
      counts_.adapters.push_back(targets.counts());
      changed.insert(targets.changed().begin(), targets.changed().end());
    }
    note_tied(changed);
    if (options_->has_tied_embeddings) note_embedding(changed);
    for (const LoraAdapter& adapter : adapters_) {
      if (adapter.left_out.empty()) continue;
      add_note("tensors that change the base",
               "tensors that PEFT needs only to train the adapter, which are left out: '" +
                   printable(adapter.left_out.front()) + "'",
               adapter.left_out.size());
    }
  }

  /// Adds a note if adapters change one of the two embeddings that config.json ties, or give both
  /// of them different changes: a loader uses one tensor at both ends of the model.
  void note_embedding(const std::set<std::size_t>& changed) {
    std::map<EmbeddingEnd, std::set<std::size_t>> stored;
    const auto add_end = [&](const std::string& name) {
      const auto index = entries_.front().find_tensor(name);
      if (index) stored[embedding_end_of(name)].insert(*index);
    };
    for (const TensorEntry& tensor : contents_.tensors) add_end(tensor.meta.fqn);
    for (const formats::Alias& alias : contents_.aliases) add_end(alias.fqn);
    if (stored.contains(EmbeddingEnd::input) && stored.contains(EmbeddingEnd::output)) {
      return note_both_embeddings(stored[EmbeddingEnd::input], stored[EmbeddingEnd::output],
                                  changed);
    }
    for (const std::size_t index : changed) {
      const std::string& name = contents_.tensors[index].meta.fqn;
      const EmbeddingEnd end = embedding_end_of(name);
      if (end == EmbeddingEnd::none) continue;
      const std::string other =
          end == EmbeddingEnd::input ? "the output layer" : "the input embedding";
      return add_note("changes by adapters to tensors that are not tied",
                      "tied embeddings in config.json, so a loader gives the change to " + other +
                          " too, which is not stored: '" + printable(name) + "'",
                      1);
    }
  }

  /// As note_embedding, for a checkpoint that stores both ends. A tensor that is at both ends, or
  /// is replaced by equal ones at both, needs no note.
  void note_both_embeddings(const std::set<std::size_t>& inputs,
                            const std::set<std::size_t>& outputs,
                            const std::set<std::size_t>& changed) {
    const auto becomes_equal = [&](std::size_t a, std::size_t b) {
      const auto first = replaced_.find(a);
      const auto second = replaced_.find(b);
      return a == b || (first != replaced_.end() && second != replaced_.end() &&
                        have_equal_numbers(first->second, second->second));
    };
    for (const std::size_t input : inputs) {
      for (const std::size_t output : outputs) {
        if (!changed.contains(input) && !changed.contains(output)) continue;
        if (becomes_equal(input, output)) continue;
        const std::size_t one = changed.contains(output) ? output : input;
        const bool are_both = changed.contains(input) && changed.contains(output);
        return add_note("the same change to both embeddings, because config.json ties them",
                        std::string(are_both ? "different changes" : "a change to one of them") +
                            ", and a loader keeps both tensors only if config.json says "
                            "\"tie_word_embeddings\": false: '" +
                            printable(contents_.tensors[one].meta.fqn) + "'",
                        1);
      }
    }
  }

  /// Adds a note about tied tensors that adapters change: each of their names gets the change, also
  /// one that no adapter has.
  void note_tied(const std::set<std::size_t>& changed) {
    const reshard::MovedSelection selected(contents_, options_->selection);
    std::map<std::string_view, std::vector<std::string_view>> names;  // by the first name
    const auto add_name = [&](std::string_view tensor, std::string_view name) {
      if (selected.contains(name)) names[tensor].push_back(name);
    };
    for (const std::size_t index : changed) {
      const std::string& name = contents_.tensors[index].meta.fqn;
      add_name(name, name);
    }
    for (const formats::Alias& alias : contents_.aliases) {
      const auto index = entries_.front().find_tensor(alias.fqn);
      if (index && changed.contains(*index)) add_name(alias.target, alias.fqn);
    }
    std::erase_if(names, [](const auto& tensor) { return tensor.second.size() < 2; });
    if (names.empty()) return;
    const auto& tied = names.begin()->second;
    add_note("changes by adapters to tensors that are not tied",
             "tied tensors, which stay tied and change together: '" + printable(tied[0]) +
                 "' and '" + printable(tied[1]) + "'",
             names.size());
  }

  /// Sorts the problems by name, and removes repeated ones: a source may be given twice.
  void sort_problems() {
    std::ranges::stable_sort(problems_, {}, [](const Finding& each) { return each.where.fqn; });
    std::vector<Finding> once;
    std::set<std::string> seen;
    for (Finding& problem : problems_) {
      if (seen.insert(finding_to_string(problem)).second) once.push_back(std::move(problem));
    }
    problems_ = std::move(once);
  }

  void count() {
    for (const auto& [name, index] : entries_.front().tensors()) {
      ++(std::holds_alternative<TensorSum>(origins_[index]) ? counts_.num_summed
                                                            : counts_.num_taken);
    }
  }

  CombinedReader::Sources sources_;
  std::vector<const CheckpointReader*> readers_;   // the sources
  std::vector<Step> steps_;                        // parallel to the sources
  std::vector<SelectedEntries> entries_;           // parallel to the sources
  std::vector<std::string> quantization_methods_;  // parallel to the sources
  std::vector<LoraAdapter> adapters_;
  std::unique_ptr<CombineOptions> options_;
  CheckpointContents contents_;
  std::vector<reshard::StateRole> roles_;       // of the tensors of the first source
  std::optional<reshard::CastRule> cast_rule_;  // of the first source
  std::vector<TensorOrigin> origins_;
  std::vector<ValueOrigin> values_;
  Replacements replaced_;               // by adapters
  std::vector<std::string> preferred_;  // names whose entries differ between sources
  std::vector<std::string> left_out_;   // values that the preferred source lacks
  std::vector<Finding> problems_;
  CombinationCounts counts_;
  std::set<DType> widened_;  // CombinedCheckpoint::widened
};

}  // namespace

bool can_hold(Accumulation accumulation, double weight) {
  const double held = accumulation == Accumulation::float64
                          ? weight
                          : static_cast<double>(static_cast<float>(weight));
  return std::isfinite(held) && (held == 0.0) == (weight == 0.0);
}

CombinedCheckpoint combine_checkpoints(std::vector<WeightedReader> sources,
                                       std::vector<LoraAdapter> adapters,
                                       const CombineOptions& options) {
  return Combination(std::move(sources), std::move(adapters), options).make();
}

}  // namespace tessera::arithmetic
