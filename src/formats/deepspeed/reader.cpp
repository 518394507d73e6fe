#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "base/size_text.h"
#include "formats/deepspeed.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/one_save.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/universal.h"
#include "formats/part_of_check.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using deepspeed::Entry;
using deepspeed::File;
using deepspeed::Parameter;
using deepspeed::Partition;
using deepspeed::Path;
using deepspeed::refuse;
using deepspeed::Slice;
using deepspeed::text_keys;

const std::string kConfig = "ds_config";
constexpr std::uint64_t kMaxLatestNbytes = 4096;

// What is compared of copies in the module: a small model whole, of a larger one the beginnings.
const std::string kCopies = "copies";
const std::string kWeightsInModule = "the fp32 master weights also in 'module'";
constexpr std::int64_t kMaxElementsCompared = std::int64_t{1} << 22;
constexpr std::int64_t kBeginNumel = 8192;  // of each rank's part
constexpr std::int64_t kBlockNumel = std::int64_t{1} << 18;
constexpr std::int64_t kWholeParts = std::numeric_limits<std::int64_t>::max();

/// Returns what a file such as `latest` names: a folder beside it.
std::string folder_named_by(const FileSystem& fs, const std::string& path,
                            const std::string& file) {
  const std::string latest = join_path(path, file);
  std::string name = read_file(fs, latest, kMaxLatestNbytes);
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  if (deepspeed::is_plain_name(name) && fs.kind_of(join_path(path, name)) == FileKind::directory) {
    return join_path(path, name);
  }
  throw Error::expected(ErrorKind::corruption, {.path = latest}, "latest",
                        "the name of a folder beside it", "'" + printable(name) + "'");
}

bool is_checkpoint(const std::vector<std::string>& names) {
  return deepspeed::are_of_zero(names) || deepspeed::are_universal(names);
}

/// Returns the folder of the checkpoint: `path`, or what its file `latest` names.
std::string folder_of(const FileSystem& fs, const std::string& path) {
  const std::vector<std::string> names = fs.list_directory(path);
  if (is_checkpoint(names)) return path;
  const bool has_latest = std::ranges::find(names, "latest") != names.end();
  std::string folder = folder_named_by(fs, path, has_latest ? "latest" : "latest_universal");
  const std::vector<std::string> names_in_folder = fs.list_directory(folder);
  if (is_checkpoint(names_in_folder)) return folder;
  deepspeed::require_zero_alone(names_in_folder, folder);
  throw Error::expected(
      ErrorKind::unsupported, {.path = folder}, "files of ranks",
      "optimizer states of ZeRO, such as zero_pp_rank_0_mp_rank_00_optim_states.pt", "none",
      "without ZeRO, give the path of mp_rank_00_model_states.pt");
}

class ZeroReader final : public deepspeed::ModelStatesReader {
 public:
  ZeroReader(const FileSystem& fs, std::string path, std::string folder,
             const std::vector<std::string>& as_dict)
      : ModelStatesReader(fs, std::move(path), std::move(folder), as_dict) {
    open_files(deepspeed::find_files(fs.list_directory(this->folder()), this->folder()));
    const int stage = deepspeed::stage_of(*optimizer_.front());
    deepspeed::require_one_save(this->folder(), models(), optimizer_, stage);
    partition_ = deepspeed::read_partition(model(), optimizer_, stage);
    set_world_size(optimizer_.size());
    std::set<std::string> trained;
    for (const Parameter& parameter : partition_.parameters) {
      add_parameter(parameter);
      trained.insert(parameter.fqn);
    }
    add_state();
    add_groups_and_members();
    add_rest_of_module(std::move(trained),
                       [&](const std::string& name, DType copy) { return is_rounded(name, copy); });
    add_members_of_model_states({kConfig});
    add_configurations();
    finish();
    note_changed_copies();
  }

  /// Also compares to their ends the copies in the module of which opening compared only a part.
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    const auto without_partial = [&](const Finding& finding) {
      if (partial_.empty() || finding.found != partial_) sink(finding);
    };
    ModelStatesReader::verify_part(without_partial, progress, num_threads, part);
    std::uint64_t nbytes = 0;
    for (const Copy& copy : partly_compared_) {
      nbytes += contents().tensors[copy.weights].meta.nbytes();
    }
    if (!part.takes(nbytes)) return;
    std::vector<std::string> changed;
    for (const Copy& copy : partly_compared_) {
      if (!are_equal_to(copy, kWholeParts)) changed.push_back(copy.fqn);
    }
    if (!changed.empty()) sink(note_of(kCopies, kWeightsInModule, changed_in_words(changed)));
  }

 private:
  /// A parameter whose copy in the module has the dtype of the fp32 weights.
  struct Copy {
    std::string fqn;
    std::size_t weights;  // in contents().tensors
    std::size_t in_module;
  };

  void open_files(const deepspeed::FileNames& names) {
    open_model_states(names.model);
    for (const std::string& name : names.optimizer) optimizer_.push_back(&open_file(name));
    if (models().size() == 1 || models().size() == optimizer_.size()) return;
    throw Error::expected(
        ErrorKind::corruption, {.path = folder()}, "files of ranks",
        "model states of rank 0, or of all " + std::to_string(optimizer_.size()) + " ranks",
        "of " + std::to_string(models().size()));
  }

  void add_parameter(const Parameter& parameter) {
    add_sliced(text_keys({"model", parameter.fqn}), parameter, [&](const Slice& slice) {
      Path path = deepspeed::path_of_weights(partition_.stage);
      path.push_back(slice.vector);
      return path;
    });
  }

  /// Adds a tensor of a parameter's shape. `path_of` gives the vector that a slice is cut from.
  template <class PathOf>
  void add_sliced(KeyPath name, const Parameter& parameter, const PathOf& path_of) {
    Tensor tensor = named(std::move(name));
    tensor.entry.meta.shape = parameter.shape;
    tensor.entry.meta.dtype = DType::float32;  // of a parameter without elements
    std::int64_t end = 0;
    for (const Slice& slice : slices_of(parameter)) {
      const File& file = *optimizer_[slice.rank];
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
      const File& file = *optimizer_[first.rank];
      Path below = deepspeed::path_of_state(file, partition_.stage);
      below.push_back(first.vector);
      for (const Entry* const entry : file.below(below)) {
        const Path name(entry->path.begin() + static_cast<std::ptrdiff_t>(below.size()),
                        entry->path.end());
        add_state_entry(parameter, first, name, *entry);
      }
    }
  }

  void add_state_entry(const Parameter& parameter, const Slice& first, const Path& name,
                       const Entry& entry) {
    const File& file = *optimizer_[first.rank];
    const int rank = static_cast<int>(first.rank);
    Path target{"optim", "state", parameter.fqn};
    target.insert(target.end(), name.begin(), name.end());
    if (name == Path{"step"}) {
      add_step(text_keys(target), file, entry, rank);
    } else if (entry.kind == Entry::Kind::value || file.tensor(entry).shape.empty()) {
      add_entry(text_keys(target), file, entry, rank);
    } else {
      add_sliced(text_keys(target), parameter, [&](const Slice& slice) {
        Path path = deepspeed::path_of_state(*optimizer_[slice.rank], partition_.stage);
        path.push_back(slice.vector);
        path.insert(path.end(), name.begin(), name.end());
        return path;
      });
    }
  }

  /// Returns the names of the parameters in a vector.
  std::vector<std::string> names_in(std::int64_t vector) const {
    std::vector<std::string> names;
    for (const Parameter& parameter : partition_.parameters) {
      if (parameter.vector == std::to_string(vector)) names.push_back(parameter.fqn);
    }
    return names;
  }

  void add_groups_and_members() {
    const File& file = *optimizer_.front();
    const Path optimizer = deepspeed::path_of_optimizer(partition_.stage);
    Path groups = optimizer;
    groups.emplace_back("param_groups");
    add_param_groups(file, groups, [&](std::int64_t vector) { return names_in(vector); });
    add_members(optimizer);
  }

  /// Adds what the files of optimizer states have beside groups and the state of parameters.
  /// `optimizer`: where these are.
  void add_members(const Path& optimizer) {
    const Path weights = deepspeed::path_of_weights(partition_.stage);
    const bool has_list =
        deepspeed::path_of_state(*optimizer_.front(), partition_.stage) == optimizer;
    const auto is_state = [&](const Entry& entry) {
      return entry.path[1] == optimizer.back() || entry.path[1] == weights.back();
    };
    add_members_of_optimizer(optimizer_, {optimizer.front()}, is_state);
    const auto is_below = [&](const Entry& entry) {
      return entry.path.size() > optimizer.size() &&
             std::equal(optimizer.begin(), optimizer.end(), entry.path.begin());
    };
    add_of_each_rank(optimizer_, [&](const Entry& entry) {
      if (!is_below(entry) || has_list || entry.path[2] == "state" ||
          entry.path[2] == "param_groups") {
        return KeyPath{};
      }
      KeyPath path{"deepspeed", "optimizer_state_dict", "base_optimizer_state"};
      path.insert(path.end(), entry.keys.begin() + 2, entry.keys.end());
      return path;
    });
    add_of_each_rank(optimizer_, [&](const Entry& entry) {
      const std::string& member = entry.path.front();
      if (member == optimizer.front() || member == kConfig || member == "ds_version") {
        return KeyPath{};
      }
      KeyPath path{"deepspeed", "optim_states"};
      path.insert(path.end(), entry.keys.begin(), entry.keys.end());
      return path;
    });
  }

  /// Whether the copy of a parameter in the module is in another dtype than the fp32 weights.
  bool is_rounded(const std::string& name, DType copy) const {
    const auto slices = partition_.slices.find(name);
    if (slices == partition_.slices.end()) return false;
    const Slice& slice = slices->second.front();
    Path path = deepspeed::path_of_weights(partition_.stage);
    path.push_back(slice.vector);
    const File& file = *optimizer_[slice.rank];
    return file.tensor(*file.find(path)).dtype != copy;
  }

  /// Adds each rank's configuration. Before stage 3 only rank 0 has a file of model states.
  void add_configurations() {
    std::vector<const File*> files = models();
    if (files.size() < optimizer_.size()) {
      const auto next = optimizer_.begin() + static_cast<std::ptrdiff_t>(files.size());
      files.insert(files.end(), next, optimizer_.end());
    }
    add_of_each_rank(files, [](const Entry& entry) {
      if (entry.path.front() != kConfig) return KeyPath{};
      KeyPath path{"deepspeed"};
      path.insert(path.end(), entry.keys.begin(), entry.keys.end());
      return path;
    });
  }

  /// Notes parameters whose copy in the module has the dtype of the fp32 weights, but other bytes.
  /// Of large models compares only the beginnings, so that opening reads little.
  void note_changed_copies() {
    std::int64_t left = kMaxElementsCompared;
    std::vector<std::string> changed;
    for (const Parameter& parameter : partition_.parameters) {
      const auto copy = copy_of(parameter);
      if (!copy) continue;
      const std::int64_t numel = contents().tensors[copy->weights].meta.numel();
      const bool is_whole = numel <= left;
      if (is_whole) left -= numel;
      if (!are_equal_to(*copy, is_whole ? kWholeParts : kBeginNumel)) {
        changed.push_back(parameter.fqn);
      } else if (!is_whole) {
        partly_compared_.push_back(*copy);
      }
    }
    if (!changed.empty()) note(kCopies, kWeightsInModule, changed_in_words(changed));
    if (partly_compared_.empty()) return;
    partial_ = "compared the first " + std::to_string(kBeginNumel) + " elements of each rank in " +
               counted(partly_compared_.size(), "name") + ", such as '" +
               printable(partly_compared_.front().fqn) + "'; a verify compares all";
    note(kCopies, kWeightsInModule, partial_);
  }

  /// Returns the copy of a parameter that has the weights' shape and dtype; nothing if there is
  /// none. Copies of another dtype are noted elsewhere.
  std::optional<Copy> copy_of(const Parameter& parameter) const {
    const Entry* const copy = model().find({"module", parameter.fqn});
    const TensorEntry* const weights = contents().find_tensor(spell({"model", parameter.fqn}));
    const bool is_one = copy != nullptr && copy->kind == Entry::Kind::tensor &&
                        model().tensor(*copy).shape == weights->meta.shape &&
                        model().tensor(*copy).dtype == weights->meta.dtype;
    if (!is_one) return std::nullopt;
    const auto index = static_cast<std::size_t>(weights - contents().tensors.data());
    return Copy{parameter.fqn, index, copy->index};
  }

  /// Whether the first elements of each rank's part of a parameter, at most `max_numel`, are those
  /// of its copy.
  bool are_equal_to(const Copy& copy, std::int64_t max_numel) const {
    const TensorEntry& weights = contents().tensors[copy.weights];
    std::vector<std::byte> bytes;
    std::vector<std::byte> bytes_of_copy;
    for (std::size_t i = 0; i < weights.pieces.size(); ++i) {
      const auto* const part = std::get_if<FlatRange>(&weights.pieces[i].region);
      TESSERA_CHECK(part != nullptr);
      const std::int64_t end = std::min(part->numel(), max_numel);
      for (std::int64_t begin = 0; begin < end; begin += kBlockNumel) {
        const FlatRange block{begin, std::min(end, begin + kBlockNumel)};
        bytes.resize(static_cast<std::size_t>(block.numel()) * itemsize(weights.meta.dtype));
        bytes_of_copy.resize(bytes.size());
        read_piece(copy.weights, i, block, bytes);
        model().reader().read_piece(
            copy.in_module, 0, {part->begin + block.begin, part->begin + block.end}, bytes_of_copy);
        if (bytes != bytes_of_copy) return false;
      }
    }
    return true;
  }

  static std::string changed_in_words(const std::vector<std::string>& changed) {
    return counted(changed.size(), "name") + " with other numbers there, such as '" +
           printable(changed.front()) + "'; the master weights are read";
  }

  std::vector<Copy> partly_compared_;
  std::string partial_;                 // what the note about them says; empty if there are none
  std::vector<const File*> optimizer_;  // by rank
  Partition partition_;
};

}  // namespace

std::unique_ptr<CheckpointReader> open_deepspeed(const FileSystem& fs, std::string path,
                                                 const std::vector<std::string>& as_dict) {
  std::string folder = folder_of(fs, path);
  if (deepspeed::are_universal(fs.list_directory(folder))) {
    return deepspeed::open_universal(fs, std::move(path), std::move(folder), as_dict);
  }
  return std::make_unique<ZeroReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats
