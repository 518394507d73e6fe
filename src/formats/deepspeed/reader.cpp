#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "base/size_text.h"
#include "formats/deepspeed.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/one_save.h"
#include "formats/deepspeed/parallel.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/universal.h"
#include "formats/deepspeed/without_zero.h"
#include "formats/torch_files/copies.h"
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
using deepspeed::VectorForm;

constexpr std::uint64_t kMaxLatestNbytes = 4096;

/// Returns the folder that a file such as `latest` names. The folder must be beside that file.
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
  return deepspeed::are_of_zero(names) || deepspeed::are_universal(names) ||
         deepspeed::are_without_zero(names);
}

/// Returns the checkpoint's folder: `path`, or the one that `latest` (or `latest_universal`) names.
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

/// Throws if the run kept its optimizer on NVMe. DeepSpeed then copies its swap files into the
/// step's folder: each has the bytes of one vector, under a number that only the process knew.
void require_no_swap_files(const std::vector<std::string>& names, const std::string& folder) {
  constexpr const char* kSwapFolder = "offloaded_tensors";
  if (std::ranges::find(names, kSwapFolder) == names.end()) return;
  throw Error::expected(ErrorKind::unsupported, {.path = join_path(folder, kSwapFolder)},
                        "offloaded optimizer",
                        "fp32 weights and optimizer state in the files of ranks",
                        "DeepSpeed's swap files, whose names do not say what they hold",
                        "saved with offload_optimizer on NVMe? Only the same run can load it; "
                        "engine.save_16bit_model saves the weights");
}

class ZeroReader final : public deepspeed::ModelStatesReader {
 public:
  ZeroReader(const FileSystem& fs, std::string path, std::string folder,
             const std::vector<std::string>& as_dict)
      : ModelStatesReader(fs, std::move(path), std::move(folder), as_dict) {
    open_files(deepspeed::find_files(fs.list_directory(this->folder()), this->folder()));
    const int stage = deepspeed::stage_of(*optimizer_.front());
    deepspeed::require_one_save(this->folder(), models(), optimizer_, stage);
    if (auto steps = deepspeed::differing_steps(model(), *optimizer_.front(), stage)) {
      note("steps", std::move(steps->expected), std::move(steps->found));
    }
    partition_ = deepspeed::read_partition(
        model(), optimizer_, stage,
        [&](const std::string& name, std::int64_t /*numel*/) -> std::optional<Shape> {
          const Entry* const entry = model().find({"module", name});
          if (entry == nullptr || entry->kind != Entry::Kind::tensor) return std::nullopt;
          return model().tensor(*entry).shape;
        });
    set_world_size(optimizer_.size());
    require_module(false);
    std::map<std::string, Shape> trained;
    for (const Parameter& parameter : partition_.parameters) {
      add_parameter(parameter);
      trained.emplace(parameter.fqn, parameter.shape);
    }
    add_state();
    add_groups_and_members();
    add_rest_of_module(std::move(trained),
                       [&](const std::string& name, DType copy) { return is_rounded(name, copy); });
    std::set<std::string> left_out{"ds_config"};
    if (!deepspeed::lists_parameters(model())) left_out.insert("optimizer");
    add_members_of_model_states(left_out);
    add_configurations(optimizer_);
    finish();
    for (const Parameter& parameter : partition_.parameters) {
      for (const std::string& name : names_in_module(parameter.fqn)) add_copy(parameter, name);
    }
    copies_.set_advice(advice_about_copies(model(), "the dict 'module' of " + model().name()));
    compare(copies_);
  }

 private:
  void open_files(const deepspeed::FileNames& names) {
    open_model_states(names.model);
    for (const std::string& name : names.optimizer) optimizer_.push_back(&open_file(name));
    if (models().size() == optimizer_.size()) return;
    if (is_partitioned()) {
      deepspeed::refuse_other_ranks(folder(), models().size(), optimizer_.size());
    }
    if (models().size() == 1) return;
    throw Error::expected(
        ErrorKind::corruption, {.path = folder()}, "files of ranks",
        "model states of rank 0, or of all " + std::to_string(optimizer_.size()) + " ranks",
        "model states of " + std::to_string(models().size()));
  }

  void add_parameter(const Parameter& parameter) {
    add_sliced(text_keys({"model", parameter.fqn}), parameter, [&](const Slice& slice) {
      Path path = deepspeed::path_of_weights(partition_.stage);
      path.push_back(slice.vector);
      return path;
    });
  }

  /// Adds a tensor of a parameter's shape. `path_of(slice)` returns the path of the vector that the
  /// slice is cut from; `form`: of these vectors.
  template <class PathOf>
  void add_sliced(KeyPath name, const Parameter& parameter, const PathOf& path_of,
                  VectorForm form = VectorForm::like_weights) {
    Tensor tensor = named(std::move(name));
    tensor.entry.meta.shape = parameter.shape;
    tensor.entry.meta.dtype = DType::float32;  // if the parameter has no elements
    std::int64_t end = 0;
    for (const Slice& slice : partition_.slices_of(parameter)) {
      const File& file = *optimizer_[slice.rank];
      const deepspeed::InVector at = deepspeed::vector_at(file, partition_, path_of(slice), slice,
                                                          tensor.entry.meta.fqn, form);
      const DType dtype = file.reader().contents().tensors[at.tensor].meta.dtype;
      if (!tensor.pieces.empty() && dtype != tensor.entry.meta.dtype) {
        refuse(file, tensor.entry.meta.fqn, "dtype",
               std::string(dtype_name(tensor.entry.meta.dtype)), std::string(dtype_name(dtype)));
      }
      tensor.entry.meta.dtype = dtype;
      tensor.entry.pieces.push_back(
          {FlatRange{end, end + slice.numel}, static_cast<int>(slice.rank)});
      tensor.pieces.push_back({&file, at.tensor, at.begin});
      end += slice.numel;
    }
    add(std::move(tensor));
  }

  /// Adds the state of each parameter: its elements of the vectors with state (`exp_avg`), and the
  /// scalars that belong to a whole vector (`step`).
  void add_state() {
    for (const Parameter& parameter : partition_.parameters) {
      if (partition_.slices_of(parameter).empty()) continue;
      const Slice& first = partition_.slices_of(parameter).front();
      const File& file = *optimizer_[first.rank];
      const Path below = deepspeed::path_in_state(file, partition_.stage, first.vector);
      for (const Entry* const entry : deepspeed::in_dict_order(file.below(below))) {
        const Path name(entry->path.begin() + static_cast<std::ptrdiff_t>(below.size()),
                        entry->path.end());
        const auto path_of = [&](const Slice& slice) {
          return deepspeed::path_in_state(*optimizer_[slice.rank], partition_.stage, slice.vector,
                                          name);
        };
        add_state_entry(
            parameter.fqn, name, file, *entry, static_cast<int>(first.rank),
            [&](const Path& target) {
              const auto form =
                  state_form(partition_, optimizer_, first, name, spell(text_keys(target)));
              if (const auto* const refusal = std::get_if<Error>(&form)) {
                return add_refused(text_keys(target), *refusal);
              }
              add_sliced(text_keys(target), parameter, path_of, std::get<VectorForm>(form));
            });
      }
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
    Path groups = deepspeed::path_of_optimizer(partition_.stage);
    groups.emplace_back("param_groups");
    add_state_without_items(*optimizer_.front(), groups);
    add_param_groups(*optimizer_.front(), groups, [&](std::int64_t vector) {
      return deepspeed::in_group_order(names_in(vector), model(), partition_.stage,
                                       optimizer_.size());
    });
    add_members_beside_state(optimizer_, partition_.stage);
  }

  /// Returns whether the module's copy of a parameter, of dtype `copy`, has another dtype than the
  /// fp32 weights.
  bool is_rounded(const std::string& name, DType copy) const {
    const auto slices = partition_.slices.find(name);
    if (slices == partition_.slices.end()) return false;
    const Slice& slice = slices->second.front();
    Path path = deepspeed::path_of_weights(partition_.stage);
    path.push_back(slice.vector);
    const File& file = *optimizer_[slice.rank];
    return file.tensor(*file.find(path)).dtype != copy;
  }

  /// If the module has a copy of the parameter under `name`, in the shape of the weights, or the
  /// parameter is also saved as a frozen one, adds this copy to `copies_` to be compared.
  void add_copy(const Parameter& parameter, const std::string& name) {
    const Entry* const copy = model().find({"module", name});
    const TensorEntry* const weights = contents().find_tensor(spell({"model", parameter.fqn}));
    const std::int64_t numel = weights->meta.numel();
    std::vector<deepspeed::Run> runs;
    if (copy != nullptr && copy->kind == Entry::Kind::tensor &&
        model().tensor(*copy).shape == weights->meta.shape) {
      runs.push_back({&model().reader(), copy->index, 0, numel});
    } else if (is_partitioned() && model().find({"frozen_param_shapes", name}) &&
               !is_quantized_frozen(model(), name)) {
      runs = runs_of_frozen(name, numel);
    }
    if (runs.empty()) return;
    copies_.add(
        {name, deepspeed::runs_of_weights(partition_, parameter, optimizer_), std::move(runs)});
  }

  torch_files::Copies copies_{"copies", "copies in 'module' that equal the fp32 master weights",
                              ""};
  std::vector<const File*> optimizer_;  // by rank
  Partition partition_;
};

}  // namespace

std::unique_ptr<CheckpointReader> open_deepspeed(const FileSystem& fs, std::string path,
                                                 const std::vector<std::string>& as_dict) {
  std::string folder = folder_of(fs, path);
  const std::vector<std::string> names = fs.list_directory(folder);
  if (deepspeed::are_universal(names)) {
    return deepspeed::open_universal(fs, std::move(path), std::move(folder), as_dict);
  }
  require_no_swap_files(names, folder);
  if (deepspeed::are_without_zero(names)) {
    return deepspeed::open_without_zero(fs, std::move(path), std::move(folder), as_dict);
  }
  if (deepspeed::are_of_several_model_ranks(names)) {
    return deepspeed::open_parallel(fs, std::move(path), std::move(folder), as_dict);
  }
  return std::make_unique<ZeroReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats
