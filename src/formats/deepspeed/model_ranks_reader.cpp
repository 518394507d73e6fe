#include "formats/deepspeed/model_ranks_reader.h"

#include <algorithm>
#include <iterator>

#include "base/checked_math.h"
#include "base/size_text.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/universal_members.h"
#include "tessera/base/error.h"
#include "tessera/layout/region.h"

namespace tessera::formats::deepspeed {
namespace {

/// Cuts a box into smaller boxes. The elements of each are consecutive in a tensor of `shape`.
std::vector<Box> contiguous_boxes(const Box& box, const Shape& shape) {
  if (as_flat_range(box, shape)) return {box};
  std::size_t dimension = 0;
  while (box.sizes[dimension] == 1) ++dimension;
  std::vector<Box> boxes;
  Box slice = box;
  slice.sizes[dimension] = 1;
  for (std::int64_t i = 0; i < box.sizes[dimension]; ++i) {
    slice.offsets[dimension] = box.offsets[dimension] + i;
    std::ranges::move(contiguous_boxes(slice, shape), std::back_inserter(boxes));
  }
  return boxes;
}

/// A region of the whole tensor, and the range of its elements in a rank's part.
struct Placed {
  Region region;
  FlatRange in_part;
};

/// Returns where the elements `range` of a part lie in the whole tensor. Elements outside of
/// `block` are left out.
std::vector<Placed> placed(const Joint& joint, std::size_t tensor, const Block& block,
                           FlatRange range) {
  const Shape& part = joint.parts[tensor];
  const auto flat = as_flat_range(block.in_part, part);
  const auto flat_in_whole = as_flat_range(block.in_whole, joint.whole);
  std::vector<Placed> found;
  if (flat && flat_in_whole) {
    const FlatRange both{std::max(range.begin, flat->begin), std::min(range.end, flat->end)};
    if (both.numel() <= 0) return {};
    const std::int64_t shift = flat_in_whole->begin - flat->begin;
    return {{FlatRange{both.begin + shift, both.end + shift}, both}};
  }
  for (const Box& box : boxes_of(range, part)) {
    const auto common = intersect(box, block.in_part);
    if (!common) continue;
    for (const Box& run : contiguous_boxes(*common, part)) {
      Box region = run;
      for (std::size_t i = 0; i < region.offsets.size(); ++i) {
        region.offsets[i] += block.in_whole.offsets[i] - block.in_part.offsets[i];
      }
      found.push_back({std::move(region), *as_flat_range(run, part)});
    }
  }
  return found;
}

}  // namespace

std::size_t ModelRanksReader::tensor_size(const File& model, std::size_t num_model_ranks,
                                          std::size_t otherwise) const {
  const auto count = static_cast<std::int64_t>(num_model_ranks);
  const std::int64_t size = model.number_at({"checkpoint_parallel_dimensions", "tp_degree"})
                                .value_or(static_cast<std::int64_t>(otherwise));
  const auto num_stages = model.number_at({"checkpoint_parallel_dimensions", "pp_degree"});
  if (size > 0 && size <= count && count % size == 0 &&
      num_stages.value_or(count / size) == count / size) {
    return static_cast<std::size_t>(size);
  }
  throw Error::expected(ErrorKind::corruption, {.path = folder()}, "files of ranks",
                        "model states of " + std::to_string(num_stages.value_or(1)) +
                            " stages of " + std::to_string(size) + " tensor ranks",
                        "model states of " + std::to_string(count) + " mp_ranks",
                        "not copied from all hosts?");
}

std::vector<std::vector<const File*>> ModelRanksReader::open_models(
    const std::vector<std::vector<std::string>>& names) {
  std::vector<std::vector<const File*>> models;
  for (const std::vector<std::string>& of_rank : names) {
    std::vector<const File*>& files = models.emplace_back();
    for (const std::string& name : of_rank) files.push_back(&open_file(name));
  }
  return models;
}

void ModelRanksReader::set_model_ranks(std::vector<std::vector<const File*>> models,
                                       std::size_t num_tensor, std::size_t num_data) {
  num_tensor_ = num_tensor;
  num_data_ = num_data;
  std::vector<const File*> by_rank(models.size() * num_data);
  for (std::size_t i = 0; i < models.size(); ++i) {
    for (std::size_t data = 0; data < models[i].size(); ++data) {
      by_rank[rank_of(i / num_tensor, data, i % num_tensor)] = models[i][data];
    }
  }
  model_ranks_ = std::move(models);
  set_model_states(std::move(by_rank));
}

void ModelRanksReader::read_cuts(const FileSystem& fs) {
  cuts_.emplace(fs, folder(), model_of(0, 0));
  if (!cuts_->rules().are_of_user()) {
    note_unknown_members();
    note_other_rules();
  }
  if (!cuts_->rules().replaces_member()) return;
  note("tensor parallelism", "rules in one place",
       "'" + std::string(kUniversalCheckpointInfo) + "' in the model states, and " +
           std::string(kRulesFile) + "; the rules in this file are used");
}

void ModelRanksReader::note_unknown_members() {
  const std::vector<std::string> unknown = cuts_->rules().unknown_members();
  if (unknown.empty()) return;
  note(kUniversalCheckpointInfo, "known members",
       counted(unknown.size(), "other member") + ", such as '" + printable(unknown.front()) +
           "'; not applied");
}

void ModelRanksReader::note_other_rules() {
  const File& first = model_of(0, 0);
  const auto rules = CutRules::rules_of(first);
  for (const std::vector<const File*>& of_rank : model_ranks_) {
    for (const File* const file : of_rank) {
      if (CutRules::rules_of(*file) == rules) continue;
      note(kUniversalCheckpointInfo, "the same rules in all model states",
           "different rules in " + printable(file->name()) + "; the rules in " +
               printable(first.name()) + " are applied");
      return;
    }
  }
}

Joint ModelRanksReader::join(const std::string& name, const std::vector<Shape>& parts) {
  Joint joint = cuts_->join(name, parts);
  if (!joint.vocabulary_size) return joint;
  vocabulary_size_ = *joint.vocabulary_size;
  const std::int64_t num_rows = joint.whole[0] + joint.num_padding_rows;
  const std::string in_words =
      "'" + printable(name) + "' with " + counted(static_cast<std::uint64_t>(num_rows), "row");
  if (joint.num_padding_rows > 0) padded_.push_back(in_words);
  if (num_rows < vocabulary_size_) short_of_rows_.push_back(in_words);
  return joint;
}

void ModelRanksReader::check_rule(const std::string& name,
                                  const std::vector<std::vector<Run>>& parts) {
  if (parts.size() == 1 || parts.front().empty() || cuts_->has_rule(name)) return;
  for (std::size_t tensor = 1; tensor < parts.size(); ++tensor) {
    if (!are_equal(torch_files::Copy{name, parts.front(), parts[tensor]}, kNumelThatTells)) return;
  }
  equal_parts_.push_back(name);
}

std::set<std::string> ModelRanksReader::buffers_of(std::size_t stage) const {
  std::set<std::string> names;
  const auto value = model_of(stage, 0).value_at({"buffer_names"});
  const auto* const list = value ? value->get_if<Value::List>() : nullptr;
  for (const Value& item : list == nullptr ? Value::List() : *list) {
    if (const auto* const name = item.get_if<std::string>()) names.insert(*name);
  }
  return names;
}

void ModelRanksReader::add_pieces(Tensor& tensor, const Joint& joint, std::size_t rank,
                                  const std::vector<VectorPart>& parts) {
  std::int64_t begin = 0;
  for (const VectorPart& part : parts) {
    const DType dtype = part.file->reader().contents().tensors[part.tensor].meta.dtype;
    if (!tensor.pieces.empty() && dtype != tensor.entry.meta.dtype) {
      refuse(*part.file, tensor.entry.meta.fqn, "dtype",
             std::string(dtype_name(tensor.entry.meta.dtype)), std::string(dtype_name(dtype)));
    }
    tensor.entry.meta.dtype = dtype;
    for (const Block& block : joint.blocks[rank]) {
      for (Placed& each : placed(joint, rank, block, {begin, begin + part.numel})) {
        tensor.entry.pieces.push_back({std::move(each.region), static_cast<int>(part.rank)});
        tensor.pieces.push_back({part.file, part.tensor, part.begin + each.in_part.begin - begin});
      }
    }
    begin += part.numel;
  }
}

void ModelRanksReader::add_modules() {
  std::vector<std::string> without_elements;
  for (std::size_t i = 0; i < model_ranks_.size(); ++i) {
    const File& file = *model_ranks_[i].front();
    const std::size_t tensor = i % num_tensor_;
    const std::size_t rank = rank_of(i / num_tensor_, 0, tensor);
    const std::set<std::string> buffers = buffers_of(i / num_tensor_);
    for (const Entry* const entry : file.below({"module"})) {
      const bool is_plain = entry->path.size() == 2 && entry->kind == Entry::Kind::tensor;
      if (!is_plain) continue;  // not a tensor of the state dict; read elsewhere
      const std::string& name = entry->path[1];
      if (is_partitioned() && file.tensor(*entry).numel() == 0 && !buffers.contains(name)) {
        const bool is_known = is_trained(name) || file.find({"frozen_param_shapes", name}) ||
                              file.find({"shared_params", name});
        if (!is_known && i == 0) without_elements.push_back(name);
        continue;
      }
      add_of_module({&file, entry, rank, tensor, text_keys({"model", name})});
    }
  }
  if (is_partitioned()) add_frozen_of_stage_3();
  keep_apart();
  for (const auto& [name, parts] : rest_) add_rest(parts);
  add_ties_of_parameters();
  note_rounded(rounded_.size());
  if (is_partitioned()) {
    note_different_buffers(model_ranks_, [&](const std::string& name) {
      return is_trained(name) || model_of(0, 0).find({"frozen_param_shapes", name}) != nullptr ||
             model_of(0, 0).find({"shared_params", name}) != nullptr;
    });
  }
  note_without_elements(without_elements);
}

/// Adds the frozen parameters of stage 3, but for those that were frozen during the training: their
/// fp32 weights are read. Each tensor rank has a part of a frozen parameter. This part is cut into
/// equal parts, one for each data rank.
void ModelRanksReader::add_frozen_of_stage_3() {
  for (const Entry* const entry : model_of(0, 0).below({"frozen_param_shapes"})) {
    if (entry->path.size() == 2 && !is_trained(entry->path[1])) {
      add_frozen_fragments(entry->path[1]);
    }
  }
}

void ModelRanksReader::add_frozen_fragments(const std::string& name) {
  if (is_quantized_frozen(model_of(0, 0), name)) return add_quantized_frozen(model_of(0, 0), name);
  std::vector<Shape> shapes;
  for (std::size_t tensor = 0; tensor < num_tensor_; ++tensor) {
    const auto sizes = model_of(0, tensor).value_at({"frozen_param_shapes", name});
    const auto shape = sizes ? shape_in(*sizes) : std::nullopt;
    if (!shape || !checked_numel(*shape)) {
      refuse(model_of(0, tensor), name, "frozen_param_shapes", "a shape",
             sizes ? value_to_string(*sizes) : "none");
    }
    shapes.push_back(*shape);
  }
  if (!cuts_) {
    add_refused(text_keys({"model", name}), TensorCuts::no_rules(model_of(0, 0), "model." + name));
    return;
  }
  const Joint joint = join(name, shapes);
  Tensor whole = named(text_keys({"model", name}));
  whole.entry.meta.shape = joint.whole;
  std::vector<std::vector<Run>> all;
  for (std::size_t tensor = 0; tensor < num_tensor_; ++tensor) {
    const std::vector<VectorPart> parts = fragments_of(name, tensor, numel_of(shapes[tensor]));
    add_pieces(whole, joint, tensor, parts);
    std::vector<Run>& runs = all.emplace_back();
    for (const VectorPart& part : parts) {
      runs.push_back({&part.file->reader(), part.tensor, 0, part.numel});
    }
    if (tensor > 0 && joint.kind != Joint::Kind::cut) replicas_.add({name, all.front(), runs});
  }
  check_rule(name, all);
  add(std::move(whole));
}

std::vector<VectorPart> ModelRanksReader::fragments_of(const std::string& name, std::size_t tensor,
                                                       std::int64_t numel) const {
  const std::vector<const File*>& files = model_ranks_[tensor];
  const auto ranks = static_cast<std::int64_t>(files.size());
  const std::int64_t expected = numel / ranks + (numel % ranks != 0 ? 1 : 0);
  std::vector<VectorPart> parts;
  std::int64_t end = 0;
  for (std::size_t data = 0; data < files.size(); ++data) {
    const Entry* const part = files[data]->find({"frozen_param_fragments", name});
    const bool is_vector = part != nullptr && part->kind == Entry::Kind::tensor &&
                           files[data]->tensor(*part).numel() == expected;
    if (!is_vector) {
      refuse(*files[data], name, "parts of ranks",
             "a vector of " + std::to_string(expected) + " elements",
             part == nullptr ? "none" : "a value, or a different size");
    }
    const std::int64_t taken = std::min(expected, numel - end);
    if (taken > 0) parts.push_back({files[data], part->index, 0, taken, rank_of(0, data, tensor)});
    end += std::max<std::int64_t>(taken, 0);
  }
  return parts;
}

void ModelRanksReader::add_of_module(ModulePart part) {
  const std::string name = spell({part.path[1]});
  const bool is_tensor = part.entry->kind == Entry::Kind::tensor && part.path.size() == 2;
  if (is_tensor && is_trained(name)) {
    if (is_rounded_copy(name, part)) rounded_.insert(name);
    return;
  }
  add_place_in_module(name, order_in(*part.file, part.entry->dict_order));
  torch_files::add_containers(containers_[part.rank], part.path, 1);
  std::string key = spell(part.path);
  rest_[std::move(key)].push_back(std::move(part));
}

/// Adds the dicts and lists of a rank whose keys differ from those on earlier ranks, and removes
/// them from `rest_`.
void ModelRanksReader::keep_apart() {
  torch_files::Containers joined;
  std::map<std::size_t, std::set<KeyPath>> apart;  // by rank
  for (const auto& [rank, containers] : containers_) {
    apart[rank] = torch_files::merge_containers(joined, containers);
  }
  for (auto& [name, parts] : rest_) {
    std::erase_if(parts, [&](const ModulePart& part) {
      const KeyPath* const container = torch_files::prefix_of(part.path, apart[part.rank]);
      if (container == nullptr) return false;
      add_apart(part.path, *container, {part.file, part.entry, static_cast<int>(part.rank)});
      return true;
    });
  }
  std::erase_if(rest_, [](const auto& each) { return each.second.empty(); });
}

/// Adds an entry that is not trained, such as a buffer. `parts`: its parts or copies on all
/// tensor ranks, and on all stages that share it.
void ModelRanksReader::add_rest(const std::vector<ModulePart>& parts) {
  const ModulePart& first = parts.front();
  const bool is_tensor = first.entry->kind == Entry::Kind::tensor && first.path.size() == 2;
  const std::string name = spell({first.path[1]});
  if (num_tensor_ > 1 && is_tensor && is_parameter(name)) {
    const auto is_other = [&](const ModulePart& part) {
      return !torch_files::are_equal(*first.file, *first.entry, *part.file, *part.entry);
    };
    const bool are_parts = std::ranges::any_of(parts, is_other);
    if (are_parts && !cuts_) {
      add_refused(first.path, TensorCuts::no_rules(model_of(0, 0), "model." + name));
      return;
    }
    if (are_parts || (cuts_ && cuts_->has_rule(name))) {
      add_frozen(name, parts);
      return;
    }
    without_rule_.push_back(name);
  }
  std::vector<OfRank> ranks;
  for (const ModulePart& part : parts) {
    ranks.push_back({part.file, part.entry, static_cast<int>(part.rank)});
  }
  add_of_ranks(first.path, ranks);
}

/// Whether an untrained name is a frozen parameter: all stages list buffers, none lists this name.
bool ModelRanksReader::is_parameter(const std::string& name) const {
  for (std::size_t stage = 0; stage < num_stages(); ++stage) {
    if (model_of(stage, 0).find({"buffer_names"}) == nullptr) return false;
    if (buffers_of(stage).contains(name)) return false;
  }
  return true;
}

/// Adds a frozen parameter, joined by the same rules as trained ones.
void ModelRanksReader::add_frozen(const std::string& name, const std::vector<ModulePart>& parts) {
  std::map<std::size_t, const ModulePart*> first_of;  // by tensor rank
  std::vector<Shape> shapes;
  for (const ModulePart& part : parts) {
    if (part.entry->kind != Entry::Kind::tensor) continue;
    const auto [first, is_new] = first_of.emplace(part.tensor, &part);
    if (!is_new) add_replica(name, *first->second, part);
  }
  for (const auto& [tensor, part] : first_of) {
    shapes.push_back(part->file->tensor(*part->entry).shape);
  }
  if (shapes.size() != num_tensor_) {
    refuse(*parts.front().file, name, "parts of ranks",
           "parts of " + std::to_string(num_tensor_) + " tensor ranks",
           "parts of " + std::to_string(shapes.size()));
  }
  const Joint joint = join(name, shapes);
  Tensor tensor = named(text_keys({"model", name}));
  tensor.entry.meta.shape = joint.whole;
  tensor.entry.meta.dtype = parts.front().file->tensor(*parts.front().entry).dtype;
  for (const auto& [rank, part] : first_of) {
    add_pieces(tensor, joint, rank,
               {{part->file, part->entry->index, 0, numel_of(shapes[rank]), part->rank}});
    if (joint.kind != Joint::Kind::cut && rank > 0) add_replica(name, parts.front(), *part);
  }
  add(std::move(tensor));
}

void ModelRanksReader::add_replica(const std::string& name, const ModulePart& first,
                                   const ModulePart& again) {
  const auto run_of = [](const ModulePart& part) {
    return Run{&part.file->reader(), part.entry->index, 0, part.file->tensor(*part.entry).numel()};
  };
  replicas_.add({name, {run_of(first)}, {run_of(again)}});
}

void ModelRanksReader::add_ties_of_parameters() {
  std::set<std::string> known;
  std::vector<const File*> files;
  for (const std::vector<const File*>& of_rank : model_ranks_) {
    const File& file = *of_rank.front();
    files.push_back(&file);
    for (const Entry* const entry : file.below({"shared_params"})) {
      const auto target = file.value_of(*entry);
      const auto* const name = target ? target->get_if<std::string>() : nullptr;
      if (entry->path.size() != 2 || name == nullptr || !is_trained(*name)) continue;
      if (known.insert(entry->path[1]).second) add_alias(entry->path[1], *name);
    }
  }
  note_ties_without_tensor(
      files, [&](const std::string& name) { return known.contains(name) || is_trained(name); });
}

void ModelRanksReader::note_padding() {
  const auto size = static_cast<std::uint64_t>(vocabulary_size_);
  const std::string expected = counted(size, "row") + " in each vocabulary (original_vocab_size)";
  const auto add = [&](const std::vector<std::string>& names, const std::string& what) {
    if (names.empty()) return;
    note("padding", expected, counted(names.size(), "name") + what + ", such as " + names.front());
  };
  add(padded_, " with more rows (padding, left out)");
  add(short_of_rows_, " with fewer rows");
}

void ModelRanksReader::note_rules() {
  note_padding();
  if (!equal_parts_.empty()) {
    note("tensor parallelism", "a rule for each parameter that is equal on all tensor ranks",
         counted(equal_parts_.size(), "name") + " without a rule, such as '" +
             printable(equal_parts_.front()) + "'; the parts are joined along dimension 0");
  }
  if (!without_rule_.empty()) {
    note("tensor parallelism", "for each frozen parameter, a rule that says how ranks cut it",
         counted(without_rule_.size(), "name") +
             " without a rule, but equal on all tensor ranks, such as '" +
             printable(without_rule_.front()) + "'; read as the whole parameter");
    without_rule_ = {};
  }
  if (!cuts_ || !cuts_->rules().are_of_user()) return;
  const std::vector<std::string> unused = cuts_->unused_patterns();
  if (unused.empty()) return;
  note("tensor parallelism", "patterns that a parameter uses",
       counted(unused.size(), "pattern") + " in " + std::string(kRulesFile) +
           " that no parameter uses, such as '" + printable(unused.front()) +
           "' (the first pattern that matches is used)");
}

}  // namespace tessera::formats::deepspeed
