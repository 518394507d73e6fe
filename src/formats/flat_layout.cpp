#include "formats/flat_layout.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/checked_math.h"
#include "base/json.h"
#include "formats/part_of_check.h"
#include "formats/partly_read.h"
#include "formats/simplified_values.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"
#include "tessera/base/tensor_meta.h"

namespace tessera::formats {
namespace {

constexpr std::uint64_t kMaxLayoutFileNbytes = std::uint64_t{1} << 28;

/// Reads members of JSON objects. Errors name the file and the path to the member.
class LayoutJson {
 public:
  explicit LayoutJson(const std::string& path) : path_(path) {}

  const Value& member(const Value& object, std::string_view key, const std::string& where) const {
    const Value* found = object.find(key);
    if (found == nullptr) fail(where + "." + std::string(key), "a member", "none");
    return *found;
  }
  template <class T>
  const T& member_as(const Value& object, std::string_view key, const std::string& where,
                     std::string_view expected) const {
    const Value& found = member(object, key, where);
    if (const T* value = found.get_if<T>()) return *value;
    fail(where + "." + std::string(key), expected, std::string(type_name(found)));
  }
  [[noreturn]] void fail(const std::string& rule, std::string_view expected,
                         std::string_view found) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, rule, expected, found);
  }

 private:
  const std::string& path_;
};

FlatUnitParameter parse_parameter(const LayoutJson& json, const Value& object,
                                  const std::string& where, const FlatVectorLayout& vector,
                                  const std::string& path) {
  FlatUnitParameter parameter;
  parameter.fqn = json.member_as<std::string>(object, "fqn", where, "str");
  parameter.offset = json.member_as<std::int64_t>(object, "offset", where, "int");
  for (const Value& size : json.member_as<Value::List>(object, "shape", where, "list")) {
    const auto* number = size.get_if<std::int64_t>();
    if (number == nullptr) json.fail(where + ".shape", "integers", type_name(size));
    parameter.shape.push_back(*number);
  }
  validate_tensor_meta({parameter.fqn, vector.dtype, parameter.shape}, path);
  const auto end = checked_add(parameter.offset, numel_of(parameter.shape));
  if (parameter.offset < 0 || !end || *end > vector.numel_padded) {
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = parameter.fqn},
                          "place in " + vector.key,
                          "elements within [0, " + std::to_string(vector.numel_padded) + ")",
                          "shape " + shape_to_string(parameter.shape) + " from element " +
                              std::to_string(parameter.offset));
  }
  return parameter;
}

/// Throws if two parameters share some elements but are not tied.
void check_no_overlap(const FlatVectorLayout& vector, const std::string& path) {
  std::vector<const FlatUnitParameter*> by_offset;
  for (const FlatUnitParameter& parameter : vector.parameters) {
    if (numel_of(parameter.shape) != 0) by_offset.push_back(&parameter);
  }
  std::ranges::stable_sort(by_offset, {}, &FlatUnitParameter::offset);
  for (std::size_t i = 1; i < by_offset.size(); ++i) {
    const FlatUnitParameter& before = *by_offset[i - 1];
    const FlatUnitParameter& parameter = *by_offset[i];
    const bool tied = before.offset == parameter.offset && before.shape == parameter.shape;
    if (tied || before.offset + numel_of(before.shape) <= parameter.offset) continue;
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = parameter.fqn},
                          "offset in " + vector.key,
                          "at least " + std::to_string(before.offset + numel_of(before.shape)) +
                              ", the end of " + printable(before.fqn),
                          std::to_string(parameter.offset));
  }
}

/// Returns `layers.0.up.weight` for `model.layers.0.up.weight`; nothing if there is no dot.
std::optional<std::string_view> without_first_component(std::string_view fqn) {
  const std::size_t dot = fqn.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  return fqn.substr(dot + 1);
}

/// Returns `layers.0` for `layers.0._flat_param`, empty for `_flat_param`.
std::string_view without_last_component(std::string_view fqn) {
  const std::size_t dot = fqn.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : fqn.substr(0, dot);
}

/// A vector, under a name that it may have in optimizer state: the fqn, or an end of the fqn.
struct NamedVector {
  const FlatVectorLayout* layout;
  std::string_view missing;                 // what the name lacks of the fqn, such as `model.`
  const FlatVectorLayout* other = nullptr;  // a vector of another layout that has the name too

  /// Returns the parameters that are not tied to an earlier one, with the names that they have in
  /// optimizer state: they lack what the vector's name lacks.
  std::vector<std::pair<const FlatUnitParameter*, std::string_view>> parameters() const {
    std::vector<std::pair<const FlatUnitParameter*, std::string_view>> found;
    std::set<std::pair<std::int64_t, Shape>> seen;
    for (const FlatUnitParameter& parameter : layout->parameters) {
      if (!seen.emplace(parameter.offset, parameter.shape).second) continue;
      std::string_view name = parameter.fqn;
      if (name.starts_with(missing)) name.remove_prefix(missing.size());
      found.emplace_back(&parameter, name);
    }
    return found;
  }

  /// Whether state of both vectors has the same parts, with the same names.
  bool divides_like(const NamedVector& vector) const {
    const auto is_equal = [](const auto& a, const auto& b) {
      return a.first->offset == b.first->offset && a.first->shape == b.first->shape &&
             a.second == b.second;
    };
    return layout->numel_padded == vector.layout->numel_padded &&
           std::ranges::equal(parameters(), vector.parameters(), is_equal);
  }
};
using VectorsByName = std::unordered_map<std::string_view, NamedVector>;

/// Returns the vectors by their fqns, and by each end of an fqn that follows a dot. Of the vectors
/// of one model, the outermost has the short name: `_flat_param` is `model._flat_param`, and not
/// `model.layers.0._flat_param`.
VectorsByName by_names(const std::vector<FlatVectorLayout>& layout) {
  std::unordered_map<std::string_view, std::vector<NamedVector>> candidates;
  for (const FlatVectorLayout& vector : layout) {
    const std::string_view fqn = vector.key;
    for (std::size_t begin = 0;; begin = fqn.find('.', begin) + 1) {
      candidates[fqn.substr(begin)].push_back({&vector, fqn.substr(0, begin)});
      if (fqn.find('.', begin) == std::string_view::npos) break;
    }
  }
  VectorsByName vectors;
  for (const auto& [name, of_name] : candidates) {
    NamedVector vector = *std::ranges::min_element(
        of_name, {}, [](const NamedVector& each) { return each.missing.size(); });
    const auto is_inner = [](const NamedVector& each) {
      return std::ranges::count(each.missing, '.') > 1;
    };
    const auto other = std::ranges::find_if(of_name, [&](const NamedVector& each) {
      return !each.missing.starts_with(vector.missing) &&
             (is_inner(vector) || !each.divides_like(vector));
    });
    if (other != of_name.end()) vector.other = other->layout;
    vectors.emplace(name, vector);
  }
  return vectors;
}

/// Returns a key path in which the key `vector` has become the key `parameter`. Returns an empty
/// path if no key, or several keys, are `vector`.
KeyPath path_with_parameter(KeyPath path, std::string_view vector, std::string_view parameter) {
  const Key key(std::string{vector});
  if (std::ranges::count(path, key) != 1) return {};
  *std::ranges::find(path, key) = std::string(parameter);
  return path;
}

/// Returns the layout with the names that its vectors have in the checkpoint. If each rank has its
/// own file, all names begin with the first word of the file names, which a layout may lack:
/// `pytorch_model_fsdp._flat_param`.
std::vector<FlatVectorLayout> with_first_components(std::vector<FlatVectorLayout> layout,
                                                    const CheckpointContents& contents) {
  std::multimap<std::string_view, const std::string*> by_rest;
  for (const TensorEntry& tensor : contents.tensors) {
    if (const auto rest = without_first_component(tensor.meta.fqn)) {
      by_rest.emplace(*rest, &tensor.meta.fqn);
    }
  }
  for (FlatVectorLayout& vector : layout) {
    if (contents.find_tensor(vector.key) != nullptr || by_rest.count(vector.key) != 1) continue;
    const std::string& fqn = *by_rest.find(vector.key)->second;
    const std::string first = fqn.substr(0, fqn.size() - vector.key.size());
    vector.key = fqn;
    for (FlatUnitParameter& parameter : vector.parameters) parameter.fqn.insert(0, first);
  }
  return layout;
}

class FlatLayoutReader final : public DividedReader, public PartlyRead, public SimplifiedValues {
 public:
  FlatLayoutReader(std::unique_ptr<CheckpointReader> reader,
                   const std::vector<FlatVectorLayout>& layout);

  Format format() const override { return reader_->format(); }
  const std::string& path() const override { return reader_->path(); }
  const CheckpointContents& contents() const override { return contents_; }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const Source& source = sources_[tensor_index][piece_index];
    reader_->read_piece(source.tensor, source.piece,
                        {source.begin + range.begin, source.begin + range.end}, out);
  }
  Value read_value(std::size_t value_index) const override;
  std::vector<Simplification> simplifications_of_value(std::size_t value_index) const override {
    return formats::simplifications_of_value(*reader_, value_sources_[value_index]);
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override;
  std::vector<std::string> data_files() const override { return reader_->data_files(); }
  MissingData find_missing_data() const override;
  void check_files(const FindingSink& sink) const override { reader_->check_files(sink); }
  void check_rest(const RestOptions& options) const override {
    formats::check_rest(*reader_, options);
  }
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    formats::verify_part(*reader_, sink, progress, num_threads, part);
  }

 private:
  /// Where the elements of a piece come from: from piece `piece` of tensor `tensor` in the wrapped
  /// reader, beginning at the piece's element `begin`.
  struct Source {
    std::size_t tensor;
    std::size_t piece;
    std::int64_t begin;
  };
  struct Shown {
    TensorEntry entry;
    std::vector<Source> sources;
  };

  void show_parameter(std::size_t vector, const FlatUnitParameter& parameter, std::string fqn,
                      KeyPath key_path);
  void show_whole(std::size_t tensor, std::string fqn, KeyPath key_path);
  void show_vector(std::size_t vector, const FlatVectorLayout& layout);
  void show_simplifications(const std::vector<FlatVectorLayout>& layout);
  /// Optimizer state of a vector: `<prefix><name><tail>`, such as `optim.state.`, `_flat_param` and
  /// `.step`.
  struct VectorState {
    NamedVector vector;
    std::string_view prefix;
    std::string_view name;  // of the vector in this state
    std::string_view tail;  // empty: all state of the vector, such as `{}`
  };

  std::optional<VectorState> find_state(const std::string& fqn, const VectorsByName& vectors) const;
  void show_state(std::size_t state, const VectorState& of);
  void refuse_state_of_unknown(const TensorEntry& tensor,
                               const std::vector<FlatVectorLayout>& layout) const;
  void show_values(const VectorsByName& vectors);
  Value with_parameters(const Value& value, const std::string& entry) const;
  void finish();
  [[noreturn]] void refuse_key(const std::string& key) const;
  void refuse_holes(const TensorEntry& vector, const FlatVectorLayout& layout) const;
  [[noreturn]] void refuse_shared_name(const std::string& fqn, const std::string& vector,
                                       const std::string& other) const;
  [[noreturn]] void refuse(const std::string& fqn, std::string_view rule, std::string_view expected,
                           std::string_view found, std::string_view likely_cause = {}) const;

  std::unique_ptr<CheckpointReader> reader_;
  CheckpointContents contents_;
  std::vector<std::vector<Source>> sources_;  // parallel to contents_.tensors and their pieces
  std::vector<Shown> shown_;                  // until they are sorted
  std::vector<std::size_t> value_sources_;    // parallel to contents_.values
  /// A vector as an optimizer's parameter groups list it.
  struct InOptimizer {
    std::vector<std::string> parameters;  // their names there
    std::string fqn;
    std::string other;  // the fqn of another vector that has the name too; empty: none
  };
  std::map<std::string, InOptimizer, std::less<>> in_optimizer_;  // by the vector's name there
};

void FlatLayoutReader::refuse(const std::string& fqn, std::string_view rule,
                              std::string_view expected, std::string_view found,
                              std::string_view likely_cause) const {
  throw Error::expected(ErrorKind::mismatch, {.path = path(), .fqn = fqn}, rule, expected, found,
                        likely_cause);
}

FlatLayoutReader::FlatLayoutReader(std::unique_ptr<CheckpointReader> reader,
                                   const std::vector<FlatVectorLayout>& layout)
    : reader_(std::move(reader)) {
  const CheckpointContents& below = reader_->contents();
  contents_.world_size = below.world_size;
  contents_.aliases = below.aliases;
  contents_.units = below.units;
  contents_.annotations = below.annotations;
  contents_.opened_classes = below.opened_classes;
  contents_.missing_files = below.missing_files;
  contents_.part = below.part;
  contents_.opening_findings = below.opening_findings;
  show_simplifications(layout);

  std::set<std::size_t> replaced;
  for (const FlatVectorLayout& vector : layout) {
    const TensorEntry* found = below.find_tensor(vector.key);
    if (found == nullptr) refuse_key(vector.key);
    const auto index = static_cast<std::size_t>(found - below.tensors.data());
    if (!replaced.insert(index).second) {
      refuse(vector.key, "flat vector", "one layout for each vector",
             "two layouts for this vector");
    }
    show_vector(index, vector);
  }

  const VectorsByName vectors = by_names(layout);
  for (const auto& [name, vector] : vectors) {
    InOptimizer& in_optimizer = in_optimizer_[std::string(name)];
    in_optimizer.fqn = vector.layout->key;
    if (vector.other != nullptr) in_optimizer.other = vector.other->key;
    for (const auto& [parameter, in_state] : vector.parameters()) {
      in_optimizer.parameters.emplace_back(in_state);
    }
  }
  for (std::size_t t = 0; t < below.tensors.size(); ++t) {
    if (replaced.contains(t)) continue;
    const std::string& fqn = below.tensors[t].meta.fqn;
    const auto state = find_state(fqn, vectors);
    if (state && !state->tail.empty()) {
      show_state(t, *state);
    } else {
      refuse_state_of_unknown(below.tensors[t], layout);
      show_whole(t, fqn, below.tensors[t].key_path);
    }
  }
  show_values(vectors);
  finish();
}

/// Replaces each simplification of a vector by one for every parameter of the vector. Keeps the
/// other simplifications.
void FlatLayoutReader::show_simplifications(const std::vector<FlatVectorLayout>& layout) {
  std::unordered_map<std::string_view, const FlatVectorLayout*> by_name;
  for (const FlatVectorLayout& vector : layout) by_name.emplace(vector.key, &vector);
  for (const Simplification& simplification : reader_->contents().simplifications) {
    const auto vector = by_name.find(simplification.name);
    if (vector == by_name.end()) {
      contents_.simplifications.push_back(simplification);
      continue;
    }
    for (const FlatUnitParameter& parameter : vector->second->parameters) {
      contents_.simplifications.push_back(
          {simplification.kind, parameter.fqn, simplification.what});
    }
  }
}

void FlatLayoutReader::show_whole(std::size_t tensor, std::string fqn, KeyPath key_path) {
  Shown shown{reader_->contents().tensors[tensor], {}};
  shown.entry.meta.fqn = std::move(fqn);
  shown.entry.key_path = std::move(key_path);
  for (std::size_t p = 0; p < shown.entry.pieces.size(); ++p) {
    shown.sources.push_back({tensor, p, 0});
  }
  shown_.push_back(std::move(shown));
}

void FlatLayoutReader::show_parameter(std::size_t vector, const FlatUnitParameter& parameter,
                                      std::string fqn, KeyPath key_path) {
  const TensorEntry& below = reader_->contents().tensors[vector];
  Shown shown;
  shown.entry.meta = {std::move(fqn), below.meta.dtype, parameter.shape};
  shown.entry.key_path = std::move(key_path);
  shown.entry.dict_order = below.dict_order;
  const std::int64_t parameter_end = parameter.offset + numel_of(parameter.shape);
  for (std::size_t p = 0; p < below.pieces.size(); ++p) {
    const auto held = as_flat_range(below.pieces[p].region, below.meta.shape);
    TESSERA_CHECK(held.has_value());  // true, because every region of a 1-d tensor is one range
    const std::int64_t begin = std::max(held->begin, parameter.offset);
    const std::int64_t end = std::min(held->end, parameter_end);
    if (begin >= end) continue;
    Piece& piece = shown.entry.pieces.emplace_back();
    piece.region = FlatRange{begin - parameter.offset, end - parameter.offset};
    piece.rank = below.pieces[p].rank;
    shown.sources.push_back({vector, p, begin - held->begin});
  }
  shown_.push_back(std::move(shown));
}

/// Returns a key path that puts the parameter `fqn` into the dict of the vector. Returns an empty
/// path if the vector's key path does not show which dict this is.
KeyPath path_beside(const TensorEntry& vector, std::string_view fqn) {
  if (vector.key_path.size() < 2) return {};
  KeyPath path(vector.key_path.begin(), vector.key_path.end() - 1);
  const std::string beside = spell(path) + ".";
  if (!fqn.starts_with(beside)) return {};
  path.emplace_back(std::string(fqn.substr(beside.size())));
  return path;
}

/// Throws because no tensor of the checkpoint has the name of a vector. Lists the tensors that
/// have one more component in front of this name.
void FlatLayoutReader::refuse_key(const std::string& key) const {
  std::string similar;
  for (const TensorEntry& tensor : reader_->contents().tensors) {
    if (without_first_component(tensor.meta.fqn) != key) continue;
    similar += (similar.empty() ? "'" : ", '") + printable(tensor.meta.fqn) + "'";
  }
  if (similar.empty()) {
    refuse(key, "flat vector", "a tensor of that name", "none",
           "is it the layout of another checkpoint?");
  }
  refuse(key, "flat vector", "a tensor of that name", similar,
         "put the first part of one of these names before the names in the layout");
}

/// Throws if the layout leaves out elements that may be data: if a gap between parameters is larger
/// than FSDP1's alignment to 16 bytes can make it, or the padding at the end is larger than shards
/// of equal size need.
void FlatLayoutReader::refuse_holes(const TensorEntry& vector,
                                    const FlatVectorLayout& layout) const {
  constexpr std::uint64_t kAlignmentNbytes = 16;
  const auto max_gap = static_cast<std::int64_t>((kAlignmentNbytes - 1) / itemsize(layout.dtype));
  std::vector<const FlatUnitParameter*> by_offset;
  for (const FlatUnitParameter& parameter : layout.parameters) by_offset.push_back(&parameter);
  std::ranges::stable_sort(by_offset, {}, &FlatUnitParameter::offset);
  std::int64_t end = 0;
  const auto refuse_gap = [&](std::int64_t next, std::int64_t max_numel) {
    if (next - end <= max_numel) return;
    refuse(
        layout.key, "flat vector",
        "at most " + std::to_string(max_numel) + " elements of padding at " + std::to_string(end),
        std::to_string(next - end) + " elements that belong to no parameter",
        "is the layout incomplete?");
  };
  for (const FlatUnitParameter* parameter : by_offset) {
    refuse_gap(parameter->offset, max_gap);
    end = std::max(end, parameter->offset + numel_of(parameter->shape));
  }
  const auto num_ranks =
      std::max<std::int64_t>(contents_.world_size, static_cast<std::int64_t>(vector.pieces.size()));
  refuse_gap(layout.numel_padded, max_gap + num_ranks - 1);
}

void FlatLayoutReader::show_vector(std::size_t vector, const FlatVectorLayout& layout) {
  const TensorEntry& below = reader_->contents().tensors[vector];
  if (below.meta.shape != Shape{layout.numel_padded}) {
    refuse(layout.key, "flat vector", shape_to_string(Shape{layout.numel_padded}),
           shape_to_string(below.meta.shape), "is it the layout of another model or world size?");
  }
  if (below.meta.dtype != layout.dtype) {
    refuse(layout.key, "dtype", dtype_name(layout.dtype), dtype_name(below.meta.dtype));
  }
  refuse_holes(below, layout);
  std::map<std::pair<std::int64_t, Shape>, const FlatUnitParameter*> first_at;
  std::vector<std::pair<std::string, Shape>> of_unit;
  for (const FlatUnitParameter& parameter : layout.parameters) {
    KeyPath key_path = path_beside(below, parameter.fqn);
    const auto [first, is_first] =
        first_at.try_emplace({parameter.offset, parameter.shape}, &parameter);
    if (!is_first && numel_of(parameter.shape) != 0) {
      contents_.aliases.push_back(
          {parameter.fqn, first->second->fqn, std::move(key_path), below.dict_order});
      continue;
    }
    of_unit.emplace_back(parameter.fqn, parameter.shape);
    show_parameter(vector, parameter, parameter.fqn, std::move(key_path));
  }
  contents_.units.push_back(make_flat_unit(std::string(without_last_component(layout.key)),
                                           layout.dtype, std::move(of_unit)));
}

/// Finds the longest name of a vector that follows a component `state`.
std::optional<FlatLayoutReader::VectorState> FlatLayoutReader::find_state(
    const std::string& fqn, const VectorsByName& vectors) const {
  constexpr std::string_view kState = "state.";
  const std::string_view whole = fqn;
  std::optional<VectorState> found;
  for (std::size_t at = 0; (at = whole.find(kState, at)) != std::string_view::npos;) {
    const bool is_component = at == 0 || whole[at - 1] == '.';
    at += kState.size();
    if (!is_component) continue;
    const std::string_view rest = whole.substr(at);
    for (std::string_view name = rest; !name.empty(); name = without_last_component(name)) {
      const auto vector = vectors.find(name);
      if (vector == vectors.end()) continue;
      if (!found || found->name.size() < name.size()) {
        found = VectorState{vector->second, whole.substr(0, at), name, rest.substr(name.size())};
      }
      break;  // the other names are shorter
    }
  }
  if (found && found->vector.other != nullptr) {
    refuse_shared_name(fqn, found->vector.layout->key, found->vector.other->key);
  }
  return found;
}

void FlatLayoutReader::refuse_shared_name(const std::string& fqn, const std::string& vector,
                                          const std::string& other) const {
  refuse(fqn, "state of a flat vector", "the name of one vector",
         "a name of both " + printable(vector) + " and " + printable(other));
}

/// Throws if the tensor has the name and the shape of state of a vector, but `find_state` has not
/// found this vector.
void FlatLayoutReader::refuse_state_of_unknown(const TensorEntry& tensor,
                                               const std::vector<FlatVectorLayout>& layout) const {
  const bool is_of_vector = tensor.meta.fqn.find("_flat_param.") != std::string::npos;
  const auto has_shape = [&](const FlatVectorLayout& vector) {
    return tensor.meta.shape == Shape{vector.numel_padded};
  };
  if (!is_of_vector || std::ranges::none_of(layout, has_shape)) return;
  refuse(tensor.meta.fqn, "state of a flat vector",
         "`state.`, then the name of a vector in the layout", "another name",
         "does the layout lack a vector?");
}

void FlatLayoutReader::show_state(std::size_t state, const VectorState& of) {
  const TensorEntry& below = reader_->contents().tensors[state];
  const FlatVectorLayout& layout = *of.vector.layout;
  const bool is_scalar = below.meta.shape.empty();
  if (!is_scalar && below.meta.shape != Shape{layout.numel_padded}) {
    refuse(below.meta.fqn, "state of flat vector " + printable(layout.key),
           "shape " + shape_to_string(Shape{layout.numel_padded}) + " or []",
           shape_to_string(below.meta.shape));
  }
  for (const auto& [parameter, name] : of.vector.parameters()) {
    std::string fqn = std::string(of.prefix) + std::string(name) + std::string(of.tail);
    KeyPath key_path = path_with_parameter(below.key_path, of.name, name);
    if (is_scalar) {
      show_whole(state, std::move(fqn), std::move(key_path));
    } else {
      show_parameter(state, *parameter, std::move(fqn), std::move(key_path));
    }
  }
}

/// Shows a value in the state of a vector once for each parameter, and all other values as they
/// are.
void FlatLayoutReader::show_values(const VectorsByName& vectors) {
  std::vector<std::pair<ValueEntry, std::size_t>> shown;
  const std::vector<ValueEntry>& below = reader_->contents().values;
  for (std::size_t v = 0; v < below.size(); ++v) {
    const auto state = find_state(below[v].name, vectors);
    if (!state) {
      shown.emplace_back(below[v], v);
      continue;
    }
    for (const auto& [parameter, name] : state->vector.parameters()) {
      std::string fqn = std::string(state->prefix) + std::string(name) + std::string(state->tail);
      shown.emplace_back(
          ValueEntry{std::move(fqn), path_with_parameter(below[v].key_path, state->name, name),
                     below[v].dict_order},
          v);
    }
  }
  std::ranges::sort(shown, {},
                    [](const auto& each) -> const std::string& { return each.first.name; });
  for (auto& [value, source] : shown) {
    contents_.values.push_back(std::move(value));
    value_sources_.push_back(source);
  }
}

Value FlatLayoutReader::read_value(std::size_t value_index) const {
  const std::size_t source = value_sources_[value_index];
  Value value = reader_->read_value(source);
  const std::string& name = reader_->contents().values[source].name;
  const bool is_of_groups =
      name.starts_with("param_groups") || name.find(".param_groups") != std::string::npos;
  return is_of_groups ? with_parameters(value, name) : value;
}

/// Returns a value of an optimizer's parameter groups. In its lists, at any depth, the names of a
/// vector's parameters take the place of the vector's name. `entry`: the name of the value.
Value FlatLayoutReader::with_parameters(const Value& value, const std::string& entry) const {
  if (const auto* const dict = value.get_if<Value::Dict>()) {
    Value::Dict changed;
    for (const auto& [key, item] : *dict) changed.emplace_back(key, with_parameters(item, entry));
    return changed;
  }
  const auto* const list = value.get_if<Value::List>();
  if (list == nullptr) return value;
  Value::List changed;
  for (const Value& item : *list) {
    const auto* const name = item.get_if<std::string>();
    const auto found = name == nullptr ? in_optimizer_.end() : in_optimizer_.find(*name);
    if (found == in_optimizer_.end()) {
      changed.push_back(with_parameters(item, entry));
      continue;
    }
    const InOptimizer& vector = found->second;
    if (!vector.other.empty()) refuse_shared_name(entry, vector.fqn, vector.other);
    for (const std::string& parameter : vector.parameters) changed.emplace_back(parameter);
  }
  return changed;
}

void FlatLayoutReader::finish() {
  std::ranges::sort(shown_, {},
                    [](const Shown& s) -> const std::string& { return s.entry.meta.fqn; });
  std::ranges::sort(contents_.aliases, {}, &Alias::fqn);
  std::set<std::string_view> names;
  const auto claim = [&](const std::string& name) {
    if (!names.insert(name).second) {
      refuse(name, "name", "one tensor or value of that name", "two",
             "does the checkpoint have both the parameter and its flat vector?");
    }
  };
  for (const Shown& shown : shown_) claim(shown.entry.meta.fqn);
  for (const Alias& alias : contents_.aliases) claim(alias.fqn);
  for (const ValueEntry& value : contents_.values) claim(value.name);
  for (Shown& shown : shown_) {
    contents_.tensors.push_back(std::move(shown.entry));
    sources_.push_back(std::move(shown.sources));
  }
  shown_.clear();
  for (const Alias& alias : contents_.aliases) {
    if (contents_.find_tensor(alias.target) == nullptr) {
      refuse(alias.fqn, "alias", "a second name of a tensor",
             "a second name of " + printable(alias.target) + ", which is no tensor",
             "is it a second name of a flat vector?");
    }
  }
}

MissingData FlatLayoutReader::find_missing_data() const {
  const MissingData below = reader_->find_missing_data();
  MissingData missing;
  for (std::size_t v = 0; v < value_sources_.size(); ++v) {
    const auto lost = below.values.find(value_sources_[v]);
    if (lost != below.values.end()) missing.values.emplace(v, lost->second);
  }
  for (std::size_t t = 0; t < sources_.size(); ++t) {
    for (std::size_t p = 0; p < sources_[t].size(); ++p) {
      const auto lost = below.pieces.find(sources_[t][p].tensor);
      if (lost == below.pieces.end()) continue;
      const auto file = lost->second.find(sources_[t][p].piece);
      if (file != lost->second.end()) missing.pieces[t].emplace(p, file->second);
    }
  }
  return missing;
}

PieceStorage FlatLayoutReader::piece_storage(std::size_t tensor_index,
                                             std::size_t piece_index) const {
  const Source& source = sources_[tensor_index][piece_index];
  const TensorEntry& entry = contents_.tensors[tensor_index];
  PieceStorage storage = reader_->piece_storage(source.tensor, source.piece);
  if (storage.byte_range && storage.encoding == "plain") {
    const std::uint64_t element_nbytes = itemsize(entry.meta.dtype);
    storage.stored_nbytes =
        static_cast<std::uint64_t>(numel_of(entry.pieces[piece_index].region)) * element_nbytes;
    storage.byte_range->begin += static_cast<std::uint64_t>(source.begin) * element_nbytes;
    storage.byte_range->end = storage.byte_range->begin + storage.stored_nbytes;
  }
  return storage;
}

}  // namespace

std::vector<FlatVectorLayout> read_flat_layout(const FileSystem& fs, const std::string& path) {
  const Value root = parse_json(read_file(fs, path, kMaxLayoutFileNbytes), path);
  const LayoutJson json(path);
  const auto schema = json.member_as<std::int64_t>(root, "schema", "flat layout", "int");
  if (schema != 1) json.fail("flat layout.schema", "1", std::to_string(schema));

  std::vector<FlatVectorLayout> layout;
  const auto& units = json.member_as<Value::List>(root, "units", "flat layout", "list");
  for (std::size_t u = 0; u < units.size(); ++u) {
    const std::string where = "units[" + std::to_string(u) + "]";
    FlatVectorLayout vector;
    vector.key = json.member_as<std::string>(units[u], "key", where, "str");
    const auto& dtype = json.member_as<std::string>(units[u], "dtype", where, "str");
    if (const auto known = parse_dtype(dtype)) {
      vector.dtype = *known;
    } else {
      json.fail(where + ".dtype", "a dtype of torch", printable(dtype));
    }
    vector.numel_padded = json.member_as<std::int64_t>(units[u], "numel_padded", where, "int");
    if (vector.numel_padded < 0) {
      json.fail(where + ".numel_padded", "0 or more", std::to_string(vector.numel_padded));
    }
    const auto& parameters = json.member_as<Value::List>(units[u], "params", where, "list");
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      vector.parameters.push_back(parse_parameter(
          json, parameters[p], where + ".params[" + std::to_string(p) + "]", vector, path));
    }
    check_no_overlap(vector, path);
    layout.push_back(std::move(vector));
  }
  return layout;
}

std::unique_ptr<CheckpointReader> apply_flat_layout(std::unique_ptr<CheckpointReader> reader,
                                                    const std::vector<FlatVectorLayout>& layout) {
  const auto named = with_first_components(layout, reader->contents());
  return std::make_unique<FlatLayoutReader>(std::move(reader), named);
}

}  // namespace tessera::formats
