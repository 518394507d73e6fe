#include "formats/deepspeed/without_zero.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string_view>
#include <utility>

#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_ranks_reader.h"
#include "formats/deepspeed/partition.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

constexpr std::int64_t kMaxNumData = 65536;
const std::string kOptimizerMember = "optimizer";

class WithoutZeroReader final : public ModelRanksReader {
 public:
  WithoutZeroReader(const FileSystem& fs, std::string path, std::string folder,
                    const std::vector<std::string>& as_dict)
      : ModelRanksReader(fs, std::move(path), std::move(folder), as_dict) {
    const ParallelFiles files =
        find_files_without_zero(fs.list_directory(this->folder()), this->folder());
    open_files(files);
    if (num_tensor() > 1) read_cuts(fs);
    set_world_size(files.model.size() * num_data());
    add_layers(files);
    add_modules();
    std::set<std::string> left_out{kOptimizerMember, "ds_config"};
    if (cuts()) left_out.insert(kUniversalCheckpointInfo);
    add_members_of_model_states(left_out);
    add_configurations(models());
    refuse_optimizer();
    note_rules();
    finish();
    compare(replicas());
  }

 private:
  bool is_trained(const std::string& /*name*/) const override { return false; }
  bool is_rounded_copy(const std::string& /*name*/, const ModulePart& /*copy*/) override {
    return false;
  }

  void open_files(const ParallelFiles& files) {
    std::vector<std::vector<const File*>> models = open_models(files.model);
    const File& first = *models.front().front();
    std::size_t otherwise = files.layers.empty() ? models.size() : 1;
    for (const LayerFile& layer : files.layers) otherwise = std::max(otherwise, layer.tensor + 1);
    const std::size_t num_tensor = tensor_size(first, models.size(), otherwise);
    for (const std::vector<const File*>& of_rank : models) require_one_save(first, *of_rank[0]);
    const std::int64_t num_data = first.number_at({"dp_world_size"}).value_or(1);
    const bool is_usual = num_data > 0 && num_data <= kMaxNumData;
    set_model_ranks(std::move(models), num_tensor,
                    is_usual ? static_cast<std::size_t>(num_data) : 1);
  }

  /// Checks that one save without ZeRO can have written both files of model states.
  static void require_one_save(const File& first, const File& file) {
    for (const char* const member : {"ds_version", "global_steps", "mp_world_size"}) {
      const auto expected = first.value_at({member});
      const auto found = file.value_at({member});
      if (expected == found) continue;
      refuse(file, {}, member, expected ? value_to_string(*expected) : "none",
             found ? value_to_string(*found) : "none");
    }
    const bool is_of_zero =
        lists_parameters(file) ||
        !file.below({kOptimizerMember, "single_partition_of_fp32_groups"}).empty();
    if (!is_of_zero) return;
    throw Error::expected(ErrorKind::corruption, {.path = file.reader().path()}, "files of ranks",
                          "optimizer states of ZeRO, *_optim_states.pt", "none",
                          "not copied from all hosts?");
  }

  /// Adds the entries of the layers' files. Their names begin with the layer's number, also in a
  /// module that several layers share, because no file records the key of such a module.
  void add_layers(const ParallelFiles& files) {
    std::set<std::pair<std::size_t, std::size_t>> found;
    for (const LayerFile& layer : files.layers) {
      if (layer.tensor >= num_tensor()) {
        throw Error::expected(ErrorKind::corruption, {.path = join_path(folder(), layer.name)},
                              "tensor rank", "a rank below " + std::to_string(num_tensor()),
                              std::to_string(layer.tensor), "a file of another run?");
      }
      found.emplace(layer.layer, layer.tensor);
      const File& file = open_file(layer.name);
      const std::string module = std::to_string(layer.layer) + ".";
      const std::size_t rank = rank_of(stage_of(module), 0, layer.tensor);
      for (const Entry& entry : file.entries()) {
        KeyPath path{"model", module + entry.path.front()};
        path.insert(path.end(), entry.keys.begin() + 1, entry.keys.end());
        add_of_module({&file, &entry, rank, layer.tensor, std::move(path)});
      }
    }
    for (const auto& [layer, tensor] : found) {
      for (std::size_t rank = 0; rank < num_tensor(); ++rank) require_layer(found, layer, rank);
    }
    require_layers_of_buffers(found);
  }

  /// Returns the stage that has the buffers of a layer; the first stage if none has.
  std::size_t stage_of(const std::string& module) const {
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      const auto is_its = [&](const std::string& name) { return name.starts_with(module); };
      if (std::ranges::any_of(buffers_of(stage), is_its)) return stage;
    }
    return 0;
  }

  void require_layer(const std::set<std::pair<std::size_t, std::size_t>>& found, std::size_t layer,
                     std::size_t tensor) const {
    if (found.contains({layer, tensor})) return;
    throw Error::expected(
        ErrorKind::corruption, {.path = folder()}, "files of layers",
        "a file of layer " + std::to_string(layer) + " of tensor rank " + std::to_string(tensor),
        "none", "not copied from its host?");
  }

  void require_layers_of_buffers(const std::set<std::pair<std::size_t, std::size_t>>& found) const {
    if (found.empty()) return;
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      for (const std::string& name : buffers_of(stage)) {
        const std::size_t digits = name.find_first_not_of("0123456789");
        if (digits == 0 || digits > 6 || name[digits] != '.') continue;
        require_layer(found, std::stoul(name.substr(0, digits)), 0);
      }
    }
  }

  /// Lists the optimizer as a value that cannot be read. Notes its fp32 weights, because the value
  /// tells nothing to a move of the model alone.
  void refuse_optimizer() {
    if (model().below({kOptimizerMember}).empty()) return;
    for (const char* const masters : {"fp32_groups_flat", "fp32_groups"}) {
      if (model().below({kOptimizerMember, masters}).empty()) continue;
      note("copies", "names of the fp32 master weights (saved only with ZeRO)",
           "none; the weights of the module are read, in its dtype");
    }
    add_refused(
        {std::string("optim")},
        Error::expected(ErrorKind::unsupported, {.path = model().reader().path(), .fqn = "optim"},
                        "optimizer", "names of the parameters (saved only with ZeRO)",
                        "numbers that begin at 0 on each stage"));
  }
};

}  // namespace

std::unique_ptr<CheckpointReader> open_without_zero(const FileSystem& fs, std::string path,
                                                    std::string folder,
                                                    const std::vector<std::string>& as_dict) {
  return std::make_unique<WithoutZeroReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats::deepspeed
