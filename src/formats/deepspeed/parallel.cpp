#include "formats/deepspeed/parallel.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_ranks_reader.h"
#include "formats/deepspeed/one_save.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/tensor_cuts.h"
#include "formats/torch_files/copies.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

const std::string kTied = "tied_modules.";

/// The files of one model rank.
struct ModelRank {
  std::vector<const File*> models;     // one, or in stage 3 by data rank
  const File* model = nullptr;         // the first one
  std::vector<const File*> optimizer;  // by data rank
  Partition partition;
};

/// A layer's file.
struct Layer {
  std::size_t number;
  std::size_t tensor;  // tensor rank
  const File* file;
  std::string module{};  // the prefix of the layer's names in the model
};

/// A parameter, and its parts on the tensor ranks of the first pipeline stage that has it.
struct Whole {
  std::string fqn;
  std::size_t stage;
  std::vector<const Parameter*> parts;  // by tensor rank
  std::optional<Joint> joint;           // nothing if the parts cannot be joined
};

class ParallelReader final : public ModelRanksReader {
 public:
  ParallelReader(const FileSystem& fs, std::string path, std::string folder,
                 const std::vector<std::string>& as_dict)
      : ModelRanksReader(fs, std::move(path), std::move(folder), as_dict) {
    const ParallelFiles files =
        find_parallel_files(fs.list_directory(this->folder()), this->folder());
    open_files(files);
    require_one_save_of_all();
    read_partitions();
    if (num_tensor() > 1) read_cuts(fs);
    set_world_size(ranks_.size() * num_data());
    gather_parameters();
    require_layers();
    name_layers();
    for (Whole& whole : wholes_) add_whole(whole);
    add_groups();
    add_layers();
    add_modules();
    add_members();
    note_rules();
    finish();
    copies_.set_advice(advice_about_copies(
        *ranks_.front().model, layers_.empty()
                                   ? "the dicts 'module' of all mp_rank_*_model_states.pt"
                                   : "in the files of layers"));
    compare(copies_);
    compare(replicas());
  }

  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    ModelStatesReader::read_piece(tensor_index, piece_index, range, out);
    const auto parts = averaged_.find(contents().tensors[tensor_index].meta.fqn);
    if (parts == averaged_.end()) return;
    const auto* const piece =
        std::get_if<FlatRange>(&contents().tensors[tensor_index].pieces[piece_index].region);
    TESSERA_CHECK(piece != nullptr);
    average(parts->second, {piece->begin + range.begin, piece->begin + range.end}, out);
  }

 private:
  // --- files

  const ModelRank& at(std::size_t stage, std::size_t tensor) const {
    return ranks_[stage * num_tensor() + tensor];
  }

  void open_files(const ParallelFiles& files) {
    std::vector<std::vector<const File*>> models = open_models(files.model);
    std::size_t otherwise = files.layers.empty() ? files.model.size() : 1;
    for (const LayerFile& layer : files.layers) otherwise = std::max(otherwise, layer.tensor + 1);
    const std::size_t num_tensor =
        tensor_size(*models.front().front(), files.model.size(), otherwise);
    const std::size_t num_data = files.optimizer.front().size();
    ranks_.resize(files.model.size());
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].models = models[i];
      ranks_[i].model = models[i].front();
      const bool is_complete = is_partitioned(*models[i].front())
                                   ? models[i].size() == num_data
                                   : models[i].size() == 1 || models[i].size() == num_data;
      if (!is_complete) {
        throw Error::expected(
            ErrorKind::corruption, {.path = folder()}, "files of ranks",
            std::to_string(num_data) + " files of model states, as many as of optimizer states",
            std::to_string(models[i].size()) + " for mp_rank " + std::to_string(i));
      }
      if (files.optimizer[i].size() != num_data) {
        throw Error::expected(
            ErrorKind::corruption, {.path = folder()}, "files of ranks",
            std::to_string(num_data) + " files of optimizer states for each mp_rank",
            std::to_string(files.optimizer[i].size()) + " for mp_rank " + std::to_string(i));
      }
      for (const std::string& name : files.optimizer[i]) {
        ranks_[i].optimizer.push_back(&open_file(name));
      }
    }
    set_model_ranks(std::move(models), num_tensor, num_data);
    for (const LayerFile& layer : files.layers) {
      if (layer.tensor >= num_tensor) {
        throw Error::expected(ErrorKind::corruption, {.path = join_path(folder(), layer.name)},
                              "tensor rank", "a rank below " + std::to_string(num_tensor),
                              std::to_string(layer.tensor), "a file of another run?");
      }
      layers_.push_back({layer.layer, layer.tensor, &open_file(layer.name)});
    }
  }

  void require_one_save_of_all() {
    const ModelRank& first = ranks_.front();
    const int stage = stage_of(*first.optimizer.front());
    if (stage == 3 && (num_stages() > 1 || !layers_.empty())) {
      throw Error::expected(ErrorKind::unsupported,
                            {.path = first.optimizer.front()->reader().path()}, "parallelism",
                            "ZeRO stage 1 or 2 with pipeline parallelism", "stage 3");
    }
    for (const ModelRank& rank : ranks_) {
      require_one_save(folder(), rank.models, rank.optimizer, stage, ranks_.size());
      require_one_save(*first.model, *first.optimizer.front(), *rank.model, *rank.optimizer.front(),
                       stage);
    }
    if (auto steps = differing_steps(*first.model, *first.optimizer.front(), stage)) {
      note("steps", std::move(steps->expected), std::move(steps->found));
    }
  }

  void read_partitions() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ModelRank& rank = ranks_[i];
      const int stage = stage_of(*rank.optimizer.front());
      const auto shape_in_module = [&](const std::string& name, std::int64_t numel) {
        return shape_of(name, numel, *rank.model, i % num_tensor());
      };
      rank.partition = read_partition(*rank.model, rank.optimizer, stage, shape_in_module);
      const ModelRank& first = ranks_[i - i % num_tensor()];
      const auto& expected = first.partition.parameters;
      const auto& found = rank.partition.parameters;
      for (std::size_t p = 0; p < std::max(expected.size(), found.size()); ++p) {
        const std::string its = p < found.size() ? found[p].fqn : "none";
        const std::string of_first = p < expected.size() ? expected[p].fqn : "none";
        if (its == of_first) continue;
        refuse(*rank.model, its, "param_shapes", of_first + ", as in " + first.model->name(), its);
      }
    }
  }

  /// Returns the shape of a parameter: from the module, or from the file of its layer. The name of
  /// a shared module does not say which layers share it: then returns the shape that all layers'
  /// tensors with this name and numel have, or nothing if there are none or their shapes differ.
  std::optional<Shape> shape_of(const std::string& name, std::int64_t numel, const File& model,
                                std::size_t tensor) const {
    const auto shape_at = [](const File& file, const Path& path) -> std::optional<Shape> {
      const Entry* const entry = file.find(path);
      if (entry == nullptr || entry->kind != Entry::Kind::tensor) return std::nullopt;
      return file.tensor(*entry).shape;
    };
    if (auto shape = shape_at(model, {"module", name})) return shape;
    const bool is_shared = name.starts_with(kTied);
    const std::size_t dot = name.find('.', is_shared ? kTied.size() : 0);
    if (dot == std::string::npos) return std::nullopt;
    std::set<Shape> shapes;
    for (const Layer& layer : layers_) {
      if (layer.tensor != tensor || (!is_shared && !is_of_layer(name, layer.number))) continue;
      const auto shape = shape_at(*layer.file, {name.substr(dot + 1)});
      if (shape && numel_of(*shape) == numel) shapes.insert(*shape);
    }
    return shapes.size() == 1 ? std::optional(*shapes.begin()) : std::nullopt;
  }

  // --- parameters

  void gather_parameters() {
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      const auto& parameters = at(stage, 0).partition.parameters;
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        Whole whole{parameters[p].fqn, stage, {}, {}};
        for (std::size_t tensor = 0; tensor < num_tensor(); ++tensor) {
          whole.parts.push_back(&at(stage, tensor).partition.parameters[p]);
        }
        const auto [first, is_new] = whole_of_.emplace(whole.fqn, wholes_.size());
        if (is_new) {
          wholes_.push_back(std::move(whole));
        } else {
          add_replica(wholes_[first->second], whole);
        }
      }
    }
  }

  std::vector<Run> weights_of(const Whole& whole, std::size_t tensor) const {
    const ModelRank& rank = at(whole.stage, tensor);
    return runs_of_weights(rank.partition, *whole.parts[tensor], rank.optimizer);
  }

  /// Remembers a copy of a parameter that an earlier stage also has, to compare both copies later.
  void add_replica(const Whole& first, const Whole& again) {
    for (std::size_t tensor = 0; tensor < num_tensor(); ++tensor) {
      if (first.parts[tensor]->shape != again.parts[tensor]->shape) {
        refuse(*at(again.stage, tensor).model, again.fqn, "param_shapes",
               shape_to_string(first.parts[tensor]->shape) + ", as in " +
                   at(first.stage, tensor).model->name(),
               shape_to_string(again.parts[tensor]->shape));
      }
      replicas().add({again.fqn, weights_of(first, tensor), weights_of(again, tensor)});
    }
  }

  void add_whole(Whole& whole) {
    try {
      whole.joint = joint_of(whole);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      add_refused(text_keys({"model", whole.fqn}), error);
      add_refused(text_keys({"optim", "state", whole.fqn}), error);
      has_refused_ = true;
      return;
    }
    add_joined(
        whole, {"model", whole.fqn},
        [&](const ModelRank& rank, const Slice& slice) {
          Path path = path_of_weights(rank.partition.stage);
          path.push_back(slice.vector);
          return path;
        },
        std::vector<VectorForm>(num_tensor(), VectorForm::like_weights));
    add_state(whole);
    std::vector<std::vector<Run>> parts;
    for (std::size_t tensor = 0; tensor < num_tensor(); ++tensor) {
      parts.push_back(weights_of(whole, tensor));
    }
    check_rule(whole.fqn, parts);
    if (whole.joint->kind != Joint::Kind::replicated) return;
    for (std::size_t tensor = 1; tensor < num_tensor(); ++tensor) {
      replicas().add({whole.fqn, parts.front(), parts[tensor]});
    }
  }

  Joint joint_of(const Whole& whole) {
    std::vector<Shape> shapes;
    for (const Parameter* const part : whole.parts) shapes.push_back(part->shape);
    if (cuts()) return join(whole.fqn, shapes);
    const Box all = whole_box(shapes.front());
    return {.whole = shapes.front(), .parts = shapes, .blocks = {{{all, all}}}};
  }

  /// Returns where the elements of the part of tensor rank `tensor` are stored. `path_of` gets its
  /// ModelRank and a Slice, and returns the path of the vector with the slice's elements.
  template <class PathOf>
  std::vector<VectorPart> parts_of(const Whole& whole, std::size_t tensor, const std::string& name,
                                   const PathOf& path_of, VectorForm form) const {
    const ModelRank& rank = at(whole.stage, tensor);
    std::vector<VectorPart> parts;
    for (const Slice& slice : rank.partition.slices_of(*whole.parts[tensor])) {
      const File& file = *rank.optimizer[slice.rank];
      const InVector in = vector_at(file, rank.partition, path_of(rank, slice), slice, name, form);
      parts.push_back(
          {&file, in.tensor, in.begin, slice.numel, rank_of(whole.stage, slice.rank, tensor)});
    }
    return parts;
  }

  /// Adds a tensor of a parameter's shape. `forms`: of the vectors, by tensor rank.
  template <class PathOf>
  void add_joined(const Whole& whole, const Path& name, const PathOf& path_of,
                  const std::vector<VectorForm>& forms) {
    Tensor tensor = named(text_keys(name));
    tensor.entry.meta.shape = whole.joint->whole;
    tensor.entry.meta.dtype = DType::float32;  // if the parameter has no elements
    std::vector<std::vector<VectorPart>> all;
    for (std::size_t t = 0; t < num_tensor(); ++t) {
      all.push_back(parts_of(whole, t, tensor.entry.meta.fqn, path_of, forms[t]));
      add_pieces(tensor, *whole.joint, t, all.back());
    }
    if (whole.joint->kind == Joint::Kind::averaged) {
      if (tensor.entry.meta.dtype != DType::float32) {
        refuse(*at(whole.stage, 0).model, tensor.entry.meta.fqn, "dtype",
               "float32, because the ranks' parts are averaged",
               std::string(dtype_name(tensor.entry.meta.dtype)));
      }
      averaged_.emplace(tensor.entry.meta.fqn, std::move(all));
    }
    add(std::move(tensor));
  }

  /// Adds the state of a parameter: its elements of the vectors with state (`exp_avg`), and the
  /// scalars that belong to a whole vector (`step`).
  void add_state(const Whole& whole) {
    for (std::size_t tensor = 0; tensor < num_tensor(); ++tensor) {
      const ModelRank& rank = at(whole.stage, tensor);
      const auto& slices = rank.partition.slices_of(*whole.parts[tensor]);
      if (slices.empty()) continue;
      const File& file = *rank.optimizer[slices.front().rank];
      const Path below = path_in_state(file, rank.partition.stage, slices.front().vector);
      const auto of_rank = static_cast<int>(rank_of(whole.stage, slices.front().rank, tensor));
      for (const Entry* const entry : in_dict_order(file.below(below))) {
        const Path name(entry->path.begin() + static_cast<std::ptrdiff_t>(below.size()),
                        entry->path.end());
        const auto path_of = [&](const ModelRank& of_part, const Slice& slice) {
          return path_in_state(*of_part.optimizer[slice.rank], of_part.partition.stage,
                               slice.vector, name);
        };
        add_state_entry(whole.fqn, name, file, *entry, of_rank, [&](const Path& target) {
          std::vector<VectorForm> forms;
          for (std::size_t t = 0; t < num_tensor(); ++t) {
            const ModelRank& other = at(whole.stage, t);
            const auto& of_other = other.partition.slices_of(*whole.parts[t]);
            std::variant<VectorForm, Error> form = VectorForm::like_weights;
            if (!of_other.empty()) {
              form = state_form(other.partition, other.optimizer, of_other.front(), name,
                                spell(text_keys(target)));
            }
            if (const auto* const refusal = std::get_if<Error>(&form)) {
              return add_refused(text_keys(target), *refusal);
            }
            forms.push_back(std::get<VectorForm>(form));
          }
          add_joined(whole, target, path_of, forms);
        });
      }
      return;
    }
  }

  /// Adds the parameter groups, with the parameters of all stages.
  void add_groups() {
    Path groups = path_of_optimizer(at(0, 0).partition.stage);
    groups.emplace_back("param_groups");
    if (!has_refused_) add_state_without_items(*at(0, 0).optimizer.front(), groups);
    add_param_groups(*at(0, 0).optimizer.front(), groups, [&](std::int64_t vector) {
      std::vector<std::string> names;
      for (const Whole& whole : wholes_) {
        if (whole.parts.front()->vector == std::to_string(vector)) names.push_back(whole.fqn);
      }
      const auto& first = at(0, 0);
      return in_group_order(std::move(names), *first.model, first.partition.stage,
                            first.optimizer.size());
    });
  }

  /// Fills `out` with the mean of the tensor ranks' elements in `range`.
  static void average(const std::vector<std::vector<VectorPart>>& ranks, FlatRange range,
                      std::span<std::byte> out) {
    std::vector<float> sum(static_cast<std::size_t>(range.numel()));
    std::vector<float> part(sum.size());
    for (const std::vector<VectorPart>& parts : ranks) {
      std::int64_t begin = 0;
      for (const VectorPart& each : parts) {
        const FlatRange both{std::max(range.begin, begin), std::min(range.end, begin + each.numel)};
        if (both.numel() > 0) {
          const auto to = std::as_writable_bytes(
              std::span(part).subspan(static_cast<std::size_t>(both.begin - range.begin),
                                      static_cast<std::size_t>(both.numel())));
          const std::int64_t first = each.begin + both.begin - begin;
          each.file->reader().read_piece(each.tensor, 0, {first, first + both.numel()}, to);
        }
        begin += each.numel;
      }
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    for (float& element : sum) element /= static_cast<float>(ranks.size());
    std::memcpy(out.data(), sum.data(), out.size());
  }

  // --- the rest of the modules

  /// Returns whether a name belongs to a layer: `3.norm.weight` belongs to layer 3.
  static bool is_of_layer(const std::string& name, std::size_t layer) {
    return name.starts_with(std::to_string(layer) + ".");
  }

  /// Returns the stage with a parameter or buffer of the layer; the first stage if none has one.
  std::size_t stage_of_layer(std::size_t layer) const {
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      const auto is_its = [&](const std::string& name) { return is_of_layer(name, layer); };
      const auto& parameters = at(stage, 0).partition.parameters;
      if (std::ranges::any_of(parameters, is_its, &Parameter::fqn)) return stage;
      if (std::ranges::any_of(buffers_of(stage), is_its)) return stage;
    }
    return 0;
  }

  /// In a pipeline: checks that layers with parameters or buffers have files of all tensor ranks.
  void require_layers() const {
    if (layers_.empty() && !ranks_.front().model->below({"module"}).empty()) return;
    std::set<std::pair<std::size_t, std::size_t>> found;
    for (const Layer& layer : layers_) found.emplace(layer.number, layer.tensor);
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      std::set<std::string> names = buffers_of(stage);
      for (const Parameter& each : at(stage, 0).partition.parameters) names.insert(each.fqn);
      for (const std::string& name : names) {
        const std::size_t digits = name.find_first_not_of("0123456789");
        if (digits == 0 || digits > 6 || name[digits] != '.') continue;
        const std::size_t number = std::stoul(name.substr(0, digits));
        for (std::size_t tensor = 0; tensor < num_tensor(); ++tensor) {
          if (found.contains({number, tensor})) continue;
          throw Error::expected(ErrorKind::corruption, {.path = folder(), .fqn = name},
                                "files of layers",
                                "a file of layer " + std::to_string(number) + " of tensor rank " +
                                    std::to_string(tensor),
                                "none", "not copied from its host?");
        }
      }
    }
  }

  /// Finds the names of the layers' entries, and their places in the module.
  void name_layers() {
    for (Layer& layer : layers_) {
      layer.module = module_of(layer);
      for (const Entry& entry : layer.file->entries()) {
        add_place_in_module(layer.module + entry.path.front(),
                            order_in(*layer.file, entry.dict_order));
      }
    }
  }

  /// Passes the entries of the layers' files (parameters and buffers) to `add_of_module`.
  void add_layers() {
    for (const Layer& layer : layers_) {
      const std::size_t rank = rank_of(stage_of_layer(layer.number), 0, layer.tensor);
      for (const Entry& entry : layer.file->entries()) {
        KeyPath path{"model", layer.module + entry.path.front()};
        path.insert(path.end(), entry.keys.begin() + 1, entry.keys.end());
        add_of_module({layer.file, &entry, rank, layer.tensor, std::move(path)});
      }
    }
  }

  bool is_trained(const std::string& name) const override { return whole_of_.contains(name); }

  bool is_rounded_copy(const std::string& name, const ModulePart& part) override {
    const Whole& trained = wholes_[whole_of_.at(name)];
    const TensorMeta& copy = part.file->tensor(*part.entry);
    if (copy.shape != trained.parts[part.tensor]->shape) {
      refuse(*part.file, name, "param_shapes", shape_to_string(trained.parts[part.tensor]->shape),
             shape_to_string(copy.shape));
    }
    std::vector<Run> weights = weights_of(trained, part.tensor);
    if (weights.empty()) return false;
    const Run& first = weights.front();
    const DType dtype = first.reader->contents().tensors[first.tensor].meta.dtype;
    copies_.add(
        {name, std::move(weights), {{&part.file->reader(), part.entry->index, 0, copy.numel()}}});
    return dtype != copy.dtype;
  }

  /// Returns the prefix of the layer's names in the model: `3.`, or `tied_modules.<key>.` if
  /// several layers share this module. The file of a layer does not say whether it is shared; this
  /// finds out by comparing its weights with those of the shared module.
  std::string module_of(const Layer& layer) const {
    const std::string by_number = std::to_string(layer.number) + ".";
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      for (const Parameter& each : at(stage, 0).partition.parameters) {
        if (is_of_layer(each.fqn, layer.number)) return by_number;
      }
    }
    for (const Whole& whole : wholes_) {
      if (!whole.fqn.starts_with(kTied)) continue;
      const std::size_t dot = whole.fqn.find('.', kTied.size());
      if (dot == std::string::npos) continue;
      const Entry* const entry = layer.file->find({whole.fqn.substr(dot + 1)});
      if (entry == nullptr || entry->kind != Entry::Kind::tensor) continue;
      const TensorMeta& copy = layer.file->tensor(*entry);
      if (copy.shape != whole.parts[layer.tensor]->shape || copy.numel() == 0) continue;
      const torch_files::Copy both{whole.fqn,
                                   weights_of(whole, layer.tensor),
                                   {{&layer.file->reader(), entry->index, 0, copy.numel()}}};
      if (are_equal(both, kNumelThatTells)) return whole.fqn.substr(0, dot + 1);
    }
    return by_number;
  }

  void add_members() {
    std::set<std::string> left_out{"ds_config"};
    if (cuts()) left_out.insert(kUniversalCheckpointInfo);
    if (!lists_parameters(model())) left_out.insert("optimizer");
    add_members_of_model_states(left_out);
    std::vector<const File*> optimizer(ranks_.size() * num_data());
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      for (std::size_t data = 0; data < num_data(); ++data) {
        optimizer[rank_of(i / num_tensor(), data, i % num_tensor())] = ranks_[i].optimizer[data];
      }
    }
    add_members_beside_state(optimizer, ranks_.front().partition.stage);
    add_configurations(optimizer);
  }

  std::vector<ModelRank> ranks_;  // by model rank
  std::vector<Layer> layers_;
  std::vector<Whole> wholes_;                    // in the order of the optimizer, stage after stage
  std::map<std::string, std::size_t> whole_of_;  // by name, in wholes_
  bool has_refused_ = false;  // whether a parameter's state is listed as a value that is refused
  /// By fqn, for tensors that are read as the mean of the tensor ranks' parts: the parts of each
  /// tensor rank.
  std::map<std::string, std::vector<std::vector<VectorPart>>> averaged_;
  Copies copies_{"copies", "copies in the module that equal the fp32 master weights", ""};
};

}  // namespace

std::unique_ptr<CheckpointReader> open_parallel(const FileSystem& fs, std::string path,
                                                std::string folder,
                                                const std::vector<std::string>& as_dict) {
  return std::make_unique<ParallelReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats::deepspeed
