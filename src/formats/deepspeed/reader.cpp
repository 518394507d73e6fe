#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <variant>

#include "formats/deepspeed.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/one_save.h"
#include "formats/deepspeed/partition.h"
#include "formats/drivers.h"
#include "formats/opened_classes.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using deepspeed::Entry;
using deepspeed::File;
using deepspeed::Parameter;
using deepspeed::Partition;
using deepspeed::Slice;
using Path = std::vector<std::string>;

constexpr std::uint64_t kMaxLatestNbytes = 4096;

/// DeepSpeed's classes whose objects are records of numbers.
const std::vector<std::string> kRecords = {"deepspeed.utils.tensor_fragment.fragment_address",
                                           "deepspeed.runtime.fp16.loss_scaler.LossScaler",
                                           "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"};

/// Members of a file of model states that become something else.
constexpr std::array<std::string_view, 6> kConsumed = {
    "module",        "param_shapes",           "frozen_param_shapes",
    "shared_params", "frozen_param_fragments", "buffer_names"};

/// Members that DeepSpeed adds to what the user saves.
constexpr std::array<std::string_view, 12> kOfDeepSpeed = {"optimizer",
                                                           "data_sampler",
                                                           "random_ltd",
                                                           "skipped_steps",
                                                           "global_steps",
                                                           "dp_world_size",
                                                           "global_samples",
                                                           "mp_world_size",
                                                           "ds_config",
                                                           "ds_version",
                                                           "checkpoint_parallel_dimensions",
                                                           "sparse_tensor_module_names"};

/// Members of the optimizer's states that say how the ranks cut its vectors.
constexpr std::array<std::string_view, 5> kOfPartition = {
    "param_slice_mappings", "zero_stage", "group_paddings", "param_alignment_paddings",
    "partition_count"};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

/// Returns what the file `latest` in a folder names.
std::string folder_named_by_latest(const FileSystem& fs, const std::string& path) {
  const std::string latest = join_path(path, "latest");
  std::string name = read_file(fs, latest, kMaxLatestNbytes);
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  const bool is_plain = !name.empty() && name != "." && name != ".." &&
                        name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
  if (is_plain && fs.kind_of(join_path(path, name)) == FileKind::directory) {
    return join_path(path, name);
  }
  throw Error::expected(ErrorKind::corruption, {.path = latest}, "latest",
                        "the name of a folder beside it", "'" + printable(name) + "'");
}

/// Returns the folder of the checkpoint: `path`, or what its file `latest` names.
std::string folder_of(const FileSystem& fs, const std::string& path) {
  if (deepspeed::are_of_zero(fs.list_directory(path))) return path;
  std::string folder = folder_named_by_latest(fs, path);
  if (deepspeed::are_of_zero(fs.list_directory(folder))) return folder;
  throw Error::expected(
      ErrorKind::unsupported, {.path = folder}, "files of ranks",
      "optimizer states of ZeRO, such as zero_pp_rank_0_mp_rank_00_optim_states.pt", "none",
      "without ZeRO, give the path of mp_rank_00_model_states.pt");
}

class ZeroReader final : public CheckpointReader {
 public:
  ZeroReader(const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict)
      : path_(std::move(path)), folder_(folder_of(fs, path_)) {
    open_files(fs, as_dict);
    const int stage = deepspeed::stage_of(optimizer_.front());
    deepspeed::require_one_save(folder_, models_, optimizer_, stage);
    partition_ = deepspeed::read_partition(model(), optimizer_, stage);
    contents_.world_size = static_cast<int>(optimizer_.size());
    for (const Parameter& parameter : partition_.parameters) add_parameter(parameter);
    add_state();
    add_param_groups();
    add_rest_of_module();
    add_other_members();
    add_what_readers_found();
    sort_entries();
  }

  Format format() const override { return deepspeed_driver().format(); }
  const std::string& path() const override { return path_; }
  const CheckpointContents& contents() const override { return contents_; }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    const Source& source = tensors_[tensor_index].pieces[piece_index];
    if (source.number) {
      TESSERA_CHECK(out.size() == sizeof(float) && range.numel() == 1);
      std::memcpy(out.data(), &*source.number, sizeof(float));
      return;
    }
    source.file->reader().read_piece(source.tensor, 0,
                                     {source.begin + range.begin, source.begin + range.end}, out);
  }
  Value read_value(std::size_t value_index) const override {
    const auto& [name, path, source] = values_[value_index];
    if (const auto* const value = std::get_if<Value>(&source)) return *value;
    const auto& [file, index] = std::get<ValueSource>(source);
    return file->reader().read_value(index);
  }
  PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const override {
    const TensorEntry& tensor = contents_.tensors[tensor_index];
    const Source& source = tensors_[tensor_index].pieces[piece_index];
    PieceStorage storage{.file = source.file->name(), .byte_range = {}, .encoding = "plain"};
    if (!source.number) storage = source.file->reader().piece_storage(source.tensor, 0);
    storage.stored_nbytes = nbytes_of(tensor.pieces[piece_index].region, tensor.meta.dtype);
    if (storage.byte_range) {
      storage.byte_range->begin +=
          static_cast<std::uint64_t>(source.begin) * itemsize(tensor.meta.dtype);
      storage.byte_range->end = storage.byte_range->begin + storage.stored_nbytes;
    }
    if (folder_ != path_) storage.file = join_path(last_component(folder_), storage.file);
    return storage;
  }
  std::vector<std::string> data_files() const override {
    std::vector<std::string> files;
    for_each_file([&](const File& file) { files.push_back(file.reader().path()); });
    return files;
  }
  void check_files(const FindingSink& /*sink*/) const override {}  // all of them were opened
  void verify(const FindingSink& sink, const ProgressSink& progress,
              int num_threads) const override {
    // The files' notes are about values of DeepSpeed's classes and copies of parameters.
    const auto without_notes = [&](const Finding& finding) {
      if (finding.severity == Finding::Severity::error) sink(finding);
    };
    for_each_file(
        [&](const File& file) { file.reader().verify(without_notes, progress, num_threads); });
    for (const Finding& finding : contents_.opening_findings) sink(finding);
  }

 private:
  /// Elements of a file's tensor from `begin` on, or a number that the file has as a value.
  struct Source {
    const File* file;
    std::size_t tensor;
    std::int64_t begin = 0;
    std::optional<float> number{};
  };
  struct Tensor {
    TensorEntry entry;
    std::vector<Source> pieces;
  };
  struct ValueSource {
    const File* file;
    std::size_t index;
  };
  struct NamedValue {
    std::string name;
    KeyPath path;
    std::variant<Value, ValueSource> source;
  };

  // --- files

  void open_files(const FileSystem& fs, std::vector<std::string> as_dict) {
    as_dict.insert(as_dict.end(), kRecords.begin(), kRecords.end());
    const auto names = deepspeed::find_files(fs.list_directory(folder_), folder_);
    for (const std::string& name : names.model) models_.emplace_back(fs, folder_, name, as_dict);
    for (const std::string& name : names.optimizer) {
      optimizer_.emplace_back(fs, folder_, name, as_dict);
    }
    if (models_.size() == 1 || models_.size() == optimizer_.size()) return;
    throw Error::expected(
        ErrorKind::corruption, {.path = folder_}, "files of ranks",
        "model states of rank 0, or of all " + std::to_string(optimizer_.size()) + " ranks",
        "of " + std::to_string(models_.size()));
  }

  const File& model() const { return models_.front(); }
  template <class Visit>
  void for_each_file(const Visit& visit) const {
    for (const File& file : models_) visit(file);
    for (const File& file : optimizer_) visit(file);
  }
  [[noreturn]] static void refuse(const File& file, const std::string& name,
                                  const std::string& rule, const std::string& expected,
                                  const std::string& found) {
    throw Error::expected(ErrorKind::corruption, {.path = file.reader().path(), .fqn = name}, rule,
                          expected, found, "files of different runs?");
  }

  // --- parameters and their state

  void add_parameter(const Parameter& parameter) {
    add_sliced({"model", parameter.fqn}, parameter, [&](const Slice& slice) {
      Path path = deepspeed::path_of_weights(partition_.stage);
      path.push_back(slice.vector);
      return path;
    });
  }

  /// Adds a tensor of a parameter's shape. `path_of` gives the vector that a slice is cut from.
  template <class PathOf>
  void add_sliced(Path name, const Parameter& parameter, const PathOf& path_of) {
    Tensor tensor = named(std::move(name));
    tensor.entry.meta.shape = parameter.shape;
    tensor.entry.meta.dtype = DType::float32;  // of a parameter without elements
    std::int64_t end = 0;
    for (const Slice& slice : slices_of(parameter)) {
      const File& file = optimizer_[slice.rank];
      const std::size_t vector = vector_at(file, path_of(slice), slice, tensor.entry.meta.fqn);
      const DType dtype = file.reader().contents().tensors[vector].meta.dtype;
      if (!tensor.pieces.empty() && dtype != tensor.entry.meta.dtype) {
        refuse(file, tensor.entry.meta.fqn, "dtype",
               std::string(dtype_name(tensor.entry.meta.dtype)), std::string(dtype_name(dtype)));
      }
      tensor.entry.meta.dtype = dtype;
      tensor.entry.pieces.push_back(
          {FlatRange{end, end + slice.numel}, static_cast<int>(slice.rank)});
      tensor.pieces.push_back({&file, vector, slice.begin});
      end += slice.numel;
    }
    add(std::move(tensor));
  }

  /// Returns the vector at a path, from which a slice is cut: a tensor of the file.
  std::size_t vector_at(const File& file, const Path& path, const Slice& slice,
                        const std::string& fqn) const {
    const Entry* const vector = file.find(path);
    const bool is_vector = vector != nullptr && vector->kind == Entry::Kind::tensor &&
                           file.tensor(*vector).shape.size() == 1;
    const std::int64_t numel = is_vector ? file.tensor(*vector).numel() : 0;
    if (is_vector && numel >= slice.begin + slice.numel &&
        deepspeed::has_length_of_vector(file, partition_.stage, slice.vector, numel)) {
      return vector->index;
    }
    refuse(file, fqn, "parts of ranks", "a vector as long as the fp32 weights",
           is_vector ? "one of " + std::to_string(numel) + " elements" : "none");
  }

  const std::vector<Slice>& slices_of(const Parameter& parameter) const {
    static const std::vector<Slice> kNone;
    const auto found = partition_.slices.find(parameter.fqn);
    return found == partition_.slices.end() ? kNone : found->second;
  }

  /// Adds the state of each parameter: parts of the vectors' state, and what the vectors share.
  void add_state() {
    for (const Parameter& parameter : partition_.parameters) {
      if (slices_of(parameter).empty()) continue;
      const Slice& first = slices_of(parameter).front();
      const File& file = optimizer_[first.rank];
      Path below = deepspeed::path_of_state(file, partition_.stage);
      below.push_back(first.vector);
      for (const Entry* const entry : file.below(below)) {
        if (entry->path.size() == below.size() + 1) add_state_entry(parameter, first, *entry);
      }
    }
  }

  void add_state_entry(const Parameter& parameter, const Slice& first, const Entry& entry) {
    const File& file = optimizer_[first.rank];
    const std::string& name = entry.path.back();
    const Path target{"optim", "state", parameter.fqn, name};
    if (entry.kind == Entry::Kind::value) {
      const auto number = name == "step" ? as_float(file.value_of(entry)) : std::nullopt;
      if (number) {
        add_number(target, first, *number);
      } else {
        add_value(target, ValueSource{&file, entry.index});
      }
    } else if (file.tensor(entry).shape.empty()) {
      add_whole(target, file, entry, static_cast<int>(first.rank));
    } else {
      add_sliced(target, parameter, [&](const Slice& slice) {
        Path path = deepspeed::path_of_state(optimizer_[slice.rank], partition_.stage);
        path.push_back(slice.vector);
        path.push_back(name);
        return path;
      });
    }
  }

  /// Returns a whole number as a float, if it is the same number.
  static std::optional<float> as_float(const std::optional<Value>& value) {
    constexpr std::int64_t kMax = std::int64_t{1} << std::numeric_limits<float>::digits;
    const auto* const number = value ? value->get_if<std::int64_t>() : nullptr;
    if (number == nullptr || *number < 0 || *number > kMax) return std::nullopt;
    return static_cast<float>(*number);
  }

  /// Adds a number as the scalar tensor that optimizers of PyTorch have for it.
  void add_number(Path name, const Slice& slice, float number) {
    Tensor tensor = named(std::move(name));
    tensor.entry.meta.dtype = DType::float32;
    tensor.entry.pieces.push_back({whole_box({}), static_cast<int>(slice.rank)});
    tensor.pieces.push_back({&optimizer_[slice.rank], 0, 0, number});
    add(std::move(tensor));
  }

  /// Adds the groups of the optimizer, with names in place of numbers.
  void add_param_groups() {
    const File& file = optimizer_.front();
    Path below = deepspeed::path_of_optimizer(partition_.stage);
    below.emplace_back("param_groups");
    for (const Entry* const entry : file.below(below)) {
      if (entry->kind != Entry::Kind::value || entry->path.size() != below.size() + 2) continue;
      const std::string& group = entry->path[below.size()];
      const std::string& field = entry->path.back();
      KeyPath path{std::string("optim"), std::string("param_groups"),
                   static_cast<std::int64_t>(std::atoll(group.c_str())), field};
      std::string name = spell(path);
      if (field == "params") {
        add_value(std::move(name), std::move(path), Value(names_of(file, *entry)));
      } else {
        add_value(std::move(name), std::move(path), ValueSource{&file, entry->index});
      }
    }
  }

  /// Returns the names of the parameters in the vectors whose numbers `params` lists.
  Value::List names_of(const File& file, const Entry& params) const {
    const auto value = file.value_of(params);
    const auto* const numbers = value ? value->get_if<Value::List>() : nullptr;
    Value::List names;
    for (const Value& item : numbers == nullptr ? Value::List() : *numbers) {
      const auto* const number = item.get_if<std::int64_t>();
      for (const Parameter& parameter : partition_.parameters) {
        const bool is_in = number != nullptr && parameter.vector == std::to_string(*number);
        if (is_in) names.emplace_back(parameter.fqn);
      }
    }
    return names;
  }

  // --- what is not trained

  /// Adds buffers, frozen parameters and ties. Notes what else the module lists.
  void add_rest_of_module() {
    std::set<std::string> known;
    for (const Parameter& parameter : partition_.parameters) known.insert(parameter.fqn);
    if (partition_.stage == 3) add_frozen_parts(known);
    add_ties(known);
    const std::set<std::string> buffers = buffer_names();
    std::map<std::size_t, std::string> names;  // by tensor of the file
    std::size_t num_rounded = 0;
    std::vector<std::string> without_elements;
    for (const Entry* const entry : model().below({"module"})) {
      if (entry->path.size() != 2) continue;
      const std::string& name = entry->path[1];
      const bool is_buffer = buffers.contains(name);
      if (entry->kind == Entry::Kind::value) {
        add_value({"model", name}, ValueSource{&model(), entry->index});
      } else if (known.contains(name)) {
        num_rounded += std::size_t{is_rounded(name, *entry)};
      } else if (partition_.stage == 3 && !is_buffer && model().tensor(*entry).numel() == 0) {
        without_elements.push_back(name);
      } else if (const auto [first, is_new] = names.emplace(entry->index, name); !is_new) {
        add_alias(name, first->second);
      } else {
        add_whole({"model", name}, model(), *entry, 0);
      }
    }
    note_rounded(num_rounded);
    note_without_elements(without_elements);
    note_different_buffers(buffers);
  }

  void add_alias(const std::string& name, const std::string& target) {
    contents_.aliases.push_back(
        {spell({"model", name}), spell({"model", target}), {std::string("model"), name}});
  }

  void add_ties(std::set<std::string>& known) {
    for (const Entry* const entry : model().below({"shared_params"})) {
      const auto target = model().value_of(*entry);
      const auto* const name = target ? target->get_if<std::string>() : nullptr;
      if (entry->path.size() != 2 || name == nullptr || !known.contains(*name)) continue;
      if (known.insert(entry->path[1]).second) add_alias(entry->path[1], *name);
    }
  }

  std::set<std::string> buffer_names() const {
    std::set<std::string> names;
    const auto value = model().value_at({"buffer_names"});
    const auto* const list = value ? value->get_if<Value::List>() : nullptr;
    for (const Value& item : list == nullptr ? Value::List() : *list) {
      if (const auto* const name = item.get_if<std::string>()) names.insert(*name);
    }
    return names;
  }

  /// Whether the copy of a parameter in the module is in another dtype than the fp32 weights.
  bool is_rounded(const std::string& name, const Entry& copy) const {
    const auto slices = partition_.slices.find(name);
    if (slices == partition_.slices.end() || model().tensor(copy).numel() == 0) return false;
    const Slice& slice = slices->second.front();
    Path path = deepspeed::path_of_weights(partition_.stage);
    path.push_back(slice.vector);
    const File& file = optimizer_[slice.rank];
    return file.tensor(*file.find(path)).dtype != model().tensor(copy).dtype;
  }

  /// Adds the frozen parameters of stage 3, of which each rank has an equal part.
  void add_frozen_parts(std::set<std::string>& known) {
    for (const Entry* const entry : model().below({"frozen_param_shapes"})) {
      const auto sizes = model().value_of(*entry);
      const auto shape =
          sizes && entry->path.size() == 2 ? deepspeed::shape_in(*sizes) : std::nullopt;
      if (!shape) {
        refuse(model(), entry->path.back(), "frozen_param_shapes", "a shape", "something else");
      }
      Tensor tensor = named({"model", entry->path[1]});
      tensor.entry.meta.shape = *shape;
      add_parts_of_frozen(entry->path[1], tensor);
      add(std::move(tensor));
      known.insert(entry->path[1]);
    }
  }

  void add_parts_of_frozen(const std::string& name, Tensor& tensor) {
    const std::int64_t numel = tensor.entry.meta.numel();
    const auto ranks = static_cast<std::int64_t>(models_.size());
    const std::int64_t expected = numel / ranks + (numel % ranks != 0 ? 1 : 0);
    std::int64_t end = 0;
    for (std::size_t rank = 0; rank < models_.size(); ++rank) {
      const File& file = models_[rank];
      const Entry* const part = file.find({"frozen_param_fragments", name});
      const bool is_vector = part != nullptr && part->kind == Entry::Kind::tensor &&
                             file.tensor(*part).numel() == expected;
      if (!is_vector) {
        refuse(file, tensor.entry.meta.fqn, "parts of ranks",
               "a vector of " + std::to_string(expected) + " elements",
               part == nullptr ? "none" : "something else");
      }
      const DType dtype = file.tensor(*part).dtype;
      if (rank > 0 && dtype != tensor.entry.meta.dtype) {
        refuse(file, tensor.entry.meta.fqn, "dtype",
               std::string(dtype_name(tensor.entry.meta.dtype)), std::string(dtype_name(dtype)));
      }
      tensor.entry.meta.dtype = dtype;
      const std::int64_t taken = std::min(expected, numel - end);
      if (taken == 0) continue;
      tensor.entry.pieces.push_back({FlatRange{end, end + taken}, static_cast<int>(rank)});
      tensor.pieces.push_back({&file, part->index, 0});
      end += taken;
    }
  }

  /// Adds what the user saved beside the model, and what DeepSpeed says of the run.
  void add_other_members() {
    for (const Entry& entry : model().entries()) {
      const std::string& member = entry.path.front();
      if (contains(kConsumed, member)) continue;
      Path path = entry.path;
      if (contains(kOfDeepSpeed, member)) path.insert(path.begin(), "deepspeed");
      add_entry(std::move(path), model(), entry);
    }
    const Path optimizer = deepspeed::path_of_optimizer(partition_.stage);
    const Path weights = deepspeed::path_of_weights(partition_.stage);
    for (const Entry& entry : optimizer_.front().entries()) {
      const Path& from = entry.path;
      if (from.size() < 2 || from.front() != optimizer.front() || from[1] == optimizer[1] ||
          from[1] == weights[1] || contains(kOfPartition, from[1])) {
        continue;
      }
      Path path{"deepspeed"};
      path.insert(path.end(), from.begin(), from.end());
      add_entry(std::move(path), optimizer_.front(), entry);
    }
  }

  void add_entry(Path path, const File& file, const Entry& entry) {
    if (entry.kind == Entry::Kind::value) {
      add_value(path, ValueSource{&file, entry.index});
    } else {
      add_whole(std::move(path), file, entry, 0);
    }
  }

  // --- adding entries

  static Tensor named(Path path) {
    Tensor tensor;
    tensor.entry.key_path = KeyPath(path.begin(), path.end());
    tensor.entry.meta.fqn = spell(tensor.entry.key_path);
    if (path.size() == 1) tensor.entry.key_path.clear();
    return tensor;
  }
  void add(Tensor tensor) {
    validate_tensor_meta(tensor.entry.meta, folder_);
    tensors_.push_back(std::move(tensor));
  }
  void add_whole(Path path, const File& file, const Entry& entry, int rank) {
    Tensor tensor = named(std::move(path));
    tensor.entry.meta.shape = file.tensor(entry).shape;
    tensor.entry.meta.dtype = file.tensor(entry).dtype;
    tensor.entry.pieces.push_back({whole_box(tensor.entry.meta.shape), rank});
    tensor.pieces.push_back({&file, entry.index, 0});
    add(std::move(tensor));
  }
  void add_value(const Path& path, ValueSource source) {
    KeyPath key_path(path.begin(), path.end());
    std::string name = spell(key_path);
    if (path.size() == 1) key_path.clear();
    add_value(std::move(name), std::move(key_path), source);
  }
  void add_value(std::string name, KeyPath path, std::variant<Value, ValueSource> source) {
    values_.push_back({std::move(name), std::move(path), std::move(source)});
  }

  void sort_entries() {
    std::ranges::sort(tensors_, {},
                      [](const Tensor& t) { return std::string_view(t.entry.meta.fqn); });
    std::ranges::sort(values_, {}, &NamedValue::name);
    std::ranges::sort(contents_.aliases, {}, &Alias::fqn);
    std::set<std::string_view> names;
    const auto require_new = [&](const std::string& name) {
      if (names.insert(name).second) return;
      throw Error::expected(ErrorKind::unsupported, {.path = folder_, .fqn = name}, "names",
                            "one entry of this name", "two",
                            "save what is beside the model under another key");
    };
    for (const Tensor& tensor : tensors_) {
      require_new(tensor.entry.meta.fqn);
      contents_.tensors.push_back(tensor.entry);
    }
    for (const NamedValue& value : values_) {
      require_new(value.name);
      contents_.values.push_back({value.name, value.path});
    }
    for (const Alias& alias : contents_.aliases) require_new(alias.fqn);
  }

  // --- notes

  void note(std::string rule, std::string expected, std::string found) {
    contents_.opening_findings.push_back({.severity = Finding::Severity::note,
                                          .rule = std::move(rule),
                                          .where = {.path = path_},
                                          .expected = std::move(expected),
                                          .found = std::move(found)});
  }
  void note_rounded(std::size_t num_rounded) {
    if (num_rounded == 0) return;
    note("copies", "each parameter once",
         counted_names(num_rounded) + " also in 'module', in the dtype of the model; the fp32 " +
             "master weights are read");
  }
  void note_without_elements(const std::vector<std::string>& names) {
    if (names.empty()) return;
    note("module", "elements of each name on some rank",
         counted_names(names.size()) + " without any, such as '" + printable(names.front()) +
             "' (a tied parameter that ZeRO stage 3 does not record?)");
  }
  /// Each rank of stage 3 saves the buffers. Those of rank 0 are read.
  void note_different_buffers(const std::set<std::string>& buffers) {
    std::vector<std::string> different;
    for (const std::string& name : buffers) {
      const auto differs = [&](const File& other) {
        return !is_same_tensor(other, {"module", name});
      };
      if (std::ranges::any_of(models_, differs)) different.push_back(name);
    }
    if (different.empty()) return;
    note("ranks", "equal buffers on all ranks",
         counted_names(different.size()) + " with other bytes on some rank, such as '" +
             printable(different.front()) + "'; that of rank 0 is read");
  }
  /// Whether a rank's tensor is that of rank 0, as far as stored checksums tell.
  bool is_same_tensor(const File& other, const Path& path) const {
    const Entry* const mine = model().find(path);
    const Entry* const its = other.find(path);
    const bool are_tensors = mine != nullptr && its != nullptr &&
                             mine->kind == Entry::Kind::tensor && its->kind == Entry::Kind::tensor;
    if (!are_tensors) return mine == nullptr && its == nullptr;
    const auto expected = model().reader().crc32_of(mine->index);
    const auto found = other.reader().crc32_of(its->index);
    return !expected || !found || *expected == *found;
  }
  static std::string counted_names(std::size_t number) {
    return std::to_string(number) + (number == 1 ? " name" : " names");
  }

  /// Adds the classes that the caller asked to read as dicts. Leaves out DeepSpeed's own classes
  /// (kRecords), which are always read as dicts.
  void add_what_readers_found() {
    OpenedClassSum opened;
    for_each_file([&](const File& file) {
      std::vector<OpenedClass> classes = file.reader().contents().opened_classes;
      std::erase_if(classes, [](const OpenedClass& opened_class) {
        return std::ranges::find(kRecords, opened_class.name) != kRecords.end();
      });
      opened.add(classes);
    });
    contents_.opened_classes = opened.classes();
  }

  std::string path_;
  std::string folder_;
  std::vector<File> models_;     // by rank; one before stage 3
  std::vector<File> optimizer_;  // by rank
  Partition partition_;
  CheckpointContents contents_;
  std::vector<Tensor> tensors_;     // parallel to contents_.tensors
  std::vector<NamedValue> values_;  // parallel to contents_.values
};

}  // namespace

std::unique_ptr<CheckpointReader> open_deepspeed(const FileSystem& fs, std::string path,
                                                 const std::vector<std::string>& as_dict) {
  return std::make_unique<ZeroReader>(fs, std::move(path), as_dict);
}

}  // namespace tessera::formats
