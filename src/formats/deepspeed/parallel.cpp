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

#include "base/size_text.h"
#include "formats/deepspeed/copies.h"
#include "formats/deepspeed/files.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/deepspeed/one_save.h"
#include "formats/deepspeed/partition.h"
#include "formats/deepspeed/tensor_cuts.h"
#include "formats/part_of_check.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

const std::string kTied = "tied_modules.";

/// The files of one model rank.
struct ModelRank {
  const File* model = nullptr;
  std::vector<const File*> optimizer;  // by data rank
  Partition partition;
};

/// A layer's file.
struct Layer {
  std::size_t number;
  std::size_t tensor;  // tensor rank
  const File* file;
};

/// A parameter, and its parts on the tensor ranks of the first pipeline stage that has it.
struct Whole {
  std::string fqn;
  std::size_t stage;
  std::vector<const Parameter*> parts;  // by tensor rank
  std::optional<Joint> joint;           // nothing if the parts cannot be joined
};

/// An entry of a module or of a layer, on one rank.
struct Part {
  const File* file;
  const Entry* entry;
  std::size_t rank;
  std::size_t tensor;  // tensor rank
  KeyPath path;        // in the checkpoint
};

/// The elements [begin, begin + numel) of a flat vector in a file. A list of such parts, one after
/// the other, makes a tensor.
struct VectorPart {
  const File* file;
  std::size_t tensor;
  std::int64_t begin;
  std::int64_t numel;
  std::size_t rank;
};

/// Splits a box into boxes, so that the elements of each are contiguous in a tensor of `shape`.
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

class ParallelReader final : public ModelStatesReader {
 public:
  ParallelReader(const FileSystem& fs, std::string path, std::string folder,
                 const std::vector<std::string>& as_dict)
      : ModelStatesReader(fs, std::move(path), std::move(folder), as_dict) {
    const ParallelFiles files =
        find_parallel_files(fs.list_directory(this->folder()), this->folder());
    open_files(files);
    require_one_save_of_all();
    read_partitions();
    if (num_tensor_ > 1) cuts_.emplace(*ranks_.front().model);
    set_world_size(ranks_.size() * num_data_);
    gather_parameters();
    require_layers();
    for (Whole& whole : wholes_) add_whole(whole);
    add_groups();
    add_rest_of_model();
    add_ties_of_parameters();
    add_members();
    note_padding();
    note_frozen_without_rule();
    finish();
    for (Copies* const copies : {&copies_, &replicas_}) {
      for (Finding& finding : copies->compare(this->path())) note(std::move(finding));
    }
  }

  /// Also compares all elements of the copies that opening compared only in part.
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    const auto without_partial = [&](const Finding& finding) {
      if (!copies_.is_about_rest(finding) && !replicas_.is_about_rest(finding)) sink(finding);
    };
    ModelStatesReader::verify_part(without_partial, progress, num_threads, part);
    for (const Copies* const copies : {&copies_, &replicas_}) {
      if (!part.takes(copies->rest_nbytes())) continue;
      for (const Finding& finding : copies->compare_rest(path())) sink(finding);
    }
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

  std::size_t rank_of(std::size_t stage, std::size_t data, std::size_t tensor) const {
    return (stage * num_data_ + data) * num_tensor_ + tensor;
  }
  std::size_t num_stages() const { return ranks_.size() / num_tensor_; }
  const ModelRank& at(std::size_t stage, std::size_t tensor) const {
    return ranks_[stage * num_tensor_ + tensor];
  }

  void open_files(const ParallelFiles& files) {
    const File& first = open_file(files.model.front());
    num_tensor_ = tensor_size(first, files);
    num_data_ = files.optimizer.front().size();
    ranks_.resize(files.model.size());
    std::vector<const File*> by_rank(ranks_.size() * num_data_);
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].model = i == 0 ? &first : &open_file(files.model[i]);
      by_rank[rank_of(i / num_tensor_, 0, i % num_tensor_)] = ranks_[i].model;
      if (files.optimizer[i].size() != num_data_) {
        throw Error::expected(
            ErrorKind::corruption, {.path = folder()}, "files of ranks",
            "optimizer states of " + std::to_string(num_data_) + " ranks, as for mp_rank 0",
            std::to_string(files.optimizer[i].size()) + " for mp_rank " + std::to_string(i));
      }
      for (const std::string& name : files.optimizer[i]) {
        ranks_[i].optimizer.push_back(&open_file(name));
      }
    }
    set_model_states(std::move(by_rank));
    for (const LayerFile& layer : files.layers) {
      if (layer.tensor >= num_tensor_) {
        throw Error::expected(ErrorKind::corruption, {.path = join_path(folder(), layer.name)},
                              "tensor rank", "a rank below " + std::to_string(num_tensor_),
                              std::to_string(layer.tensor), "a file of another run?");
      }
      layers_.push_back({layer.layer, layer.tensor, &open_file(layer.name)});
    }
  }

  /// Returns the number of tensor ranks: the number in the model states or, without one, the number
  /// of files for one layer.
  std::size_t tensor_size(const File& model, const ParallelFiles& files) const {
    const std::size_t num_model_ranks = files.model.size();
    std::int64_t size = files.layers.empty() ? static_cast<std::int64_t>(num_model_ranks) : 1;
    for (const LayerFile& layer : files.layers) {
      size = std::max(size, static_cast<std::int64_t>(layer.tensor) + 1);
    }
    const auto recorded = model.number_at({"checkpoint_parallel_dimensions", "tp_degree"});
    const auto num_stages = model.number_at({"checkpoint_parallel_dimensions", "pp_degree"});
    size = recorded.value_or(size);
    const auto count = static_cast<std::int64_t>(num_model_ranks);
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

  void require_one_save_of_all() const {
    const ModelRank& first = ranks_.front();
    const int stage = stage_of(*first.optimizer.front());
    if (stage == 3) {
      throw Error::expected(ErrorKind::unsupported,
                            {.path = first.optimizer.front()->reader().path()}, "parallelism",
                            "ZeRO stage 1 or 2 with tensor or pipeline parallelism", "stage 3");
    }
    for (const ModelRank& rank : ranks_) {
      require_one_save(folder(), {rank.model}, rank.optimizer, stage, ranks_.size());
      require_one_save(*first.model, *first.optimizer.front(), *rank.model, *rank.optimizer.front(),
                       stage);
    }
  }

  void read_partitions() {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ModelRank& rank = ranks_[i];
      const int stage = stage_of(*rank.optimizer.front());
      const auto shape_in_module = [&](const std::string& name, std::int64_t numel) {
        return shape_of(name, numel, *rank.model, i % num_tensor_);
      };
      rank.partition = read_partition(*rank.model, rank.optimizer, stage, shape_in_module);
      const ModelRank& first = ranks_[i - i % num_tensor_];
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

  /// Returns the shape of a parameter: from the module, or from the file of its layer. A module
  /// that several layers share does not name its layer; any layer with a tensor of that name and
  /// numel gives the shape. Returns nothing if such layers have different shapes.
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
        for (std::size_t tensor = 0; tensor < num_tensor_; ++tensor) {
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

  /// Adds the copy of a parameter that an earlier stage has, too. The two copies are compared.
  void add_replica(const Whole& first, const Whole& again) {
    for (std::size_t tensor = 0; tensor < num_tensor_; ++tensor) {
      if (first.parts[tensor]->shape != again.parts[tensor]->shape) {
        refuse(*at(again.stage, tensor).model, again.fqn, "param_shapes",
               shape_to_string(first.parts[tensor]->shape) + ", as in " +
                   at(first.stage, tensor).model->name(),
               shape_to_string(again.parts[tensor]->shape));
      }
      replicas_.add({again.fqn, weights_of(first, tensor), weights_of(again, tensor)});
    }
  }

  void add_whole(Whole& whole) {
    try {
      whole.joint = joint_of(whole);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      add_refused(text_keys({"model", whole.fqn}), error);
      add_refused(text_keys({"optim", "state", whole.fqn}), error);
      return;
    }
    add_joined(whole, {"model", whole.fqn}, [&](const ModelRank& rank, const Slice& slice) {
      Path path = path_of_weights(rank.partition.stage);
      path.push_back(slice.vector);
      return path;
    });
    add_state(whole);
    num_padding_rows_ += std::size_t{whole.joint->num_padding_rows > 0};
    if (whole.joint->kind != Joint::Kind::replicated) return;
    for (std::size_t tensor = 1; tensor < num_tensor_; ++tensor) {
      replicas_.add({whole.fqn, weights_of(whole, 0), weights_of(whole, tensor)});
    }
  }

  Joint joint_of(const Whole& whole) const {
    std::vector<Shape> shapes;
    for (const Parameter* const part : whole.parts) shapes.push_back(part->shape);
    if (cuts_) return cuts_->join(whole.fqn, shapes);
    const Box all = whole_box(shapes.front());
    return {.whole = shapes.front(), .parts = shapes, .blocks = {{{all, all}}}};
  }

  /// Returns where the elements of a tensor rank's part are stored. `path_of(rank, slice)` returns
  /// the path of the vector that holds them.
  template <class PathOf>
  std::vector<VectorPart> parts_of(const Whole& whole, std::size_t tensor, const std::string& name,
                                   const PathOf& path_of) const {
    const ModelRank& rank = at(whole.stage, tensor);
    std::vector<VectorPart> parts;
    for (const Slice& slice : rank.partition.slices_of(*whole.parts[tensor])) {
      const File& file = *rank.optimizer[slice.rank];
      const std::size_t vector =
          vector_at(file, rank.partition.stage, path_of(rank, slice), slice, name);
      parts.push_back(
          {&file, vector, slice.begin, slice.numel, rank_of(whole.stage, slice.rank, tensor)});
    }
    return parts;
  }

  /// Adds a tensor of a parameter's shape.
  template <class PathOf>
  void add_joined(const Whole& whole, const Path& name, const PathOf& path_of) {
    Tensor tensor = named(text_keys(name));
    tensor.entry.meta.shape = whole.joint->whole;
    tensor.entry.meta.dtype = DType::float32;  // of a parameter without elements
    std::vector<std::vector<VectorPart>> all;
    for (std::size_t t = 0; t < num_tensor_; ++t) {
      all.push_back(parts_of(whole, t, tensor.entry.meta.fqn, path_of));
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

  static void add_pieces(Tensor& tensor, const Joint& joint, std::size_t rank,
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
          tensor.pieces.push_back(
              {part.file, part.tensor, part.begin + each.in_part.begin - begin});
        }
      }
      begin += part.numel;
    }
  }

  /// Adds the state of a parameter: its elements of the vectors with state (`exp_avg`), and the
  /// scalars that belong to a whole vector (`step`).
  void add_state(const Whole& whole) {
    for (std::size_t tensor = 0; tensor < num_tensor_; ++tensor) {
      const ModelRank& rank = at(whole.stage, tensor);
      const auto& slices = rank.partition.slices_of(*whole.parts[tensor]);
      if (slices.empty()) continue;
      const File& file = *rank.optimizer[slices.front().rank];
      const Path below = path_in_state(file, rank.partition.stage, slices.front().vector);
      const auto of_rank = static_cast<int>(rank_of(whole.stage, slices.front().rank, tensor));
      for (const Entry* const entry : file.below(below)) {
        const Path name(entry->path.begin() + static_cast<std::ptrdiff_t>(below.size()),
                        entry->path.end());
        const auto path_of = [&](const ModelRank& of_part, const Slice& slice) {
          return path_in_state(*of_part.optimizer[slice.rank], of_part.partition.stage,
                               slice.vector, name);
        };
        add_state_entry(whole.fqn, name, file, *entry, of_rank,
                        [&](const Path& target) { add_joined(whole, target, path_of); });
      }
      return;
    }
  }

  /// Adds the groups, with the parameters of all stages.
  void add_groups() {
    Path groups = path_of_optimizer(at(0, 0).partition.stage);
    groups.emplace_back("param_groups");
    add_param_groups(*at(0, 0).optimizer.front(), groups, [&](std::int64_t vector) {
      std::vector<std::string> names;
      for (const Whole& whole : wholes_) {
        if (whole.parts.front()->vector == std::to_string(vector)) names.push_back(whole.fqn);
      }
      return names;
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

  // --- what else the modules have

  /// Returns whether a name belongs to a layer: `3.norm.weight` belongs to layer 3.
  static bool is_of_layer(const std::string& name, std::size_t layer) {
    return name.starts_with(std::to_string(layer) + ".");
  }

  std::set<std::string> buffers_of(std::size_t stage) const {
    std::set<std::string> names;
    const auto value = at(stage, 0).model->value_at({"buffer_names"});
    const auto* const list = value ? value->get_if<Value::List>() : nullptr;
    for (const Value& item : list == nullptr ? Value::List() : *list) {
      if (const auto* const name = item.get_if<std::string>()) names.insert(*name);
    }
    return names;
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

  /// Checks that there is a file for each layer that has parameters or buffers.
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
        for (std::size_t tensor = 0; tensor < num_tensor_; ++tensor) {
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

  /// Adds buffers and frozen parameters. Trained parameters are only compared with the weights that
  /// were read from the optimizer.
  void add_rest_of_model() {
    for (const Layer& layer : layers_) {
      const std::size_t rank = rank_of(stage_of_layer(layer.number), 0, layer.tensor);
      const std::string module = module_of(layer);
      for (const Entry& entry : layer.file->entries()) {
        KeyPath path{"model", module + entry.path.front()};
        path.insert(path.end(), entry.keys.begin() + 1, entry.keys.end());
        add_of_module({layer.file, &entry, rank, layer.tensor, std::move(path)});
      }
    }
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const std::size_t tensor = i % num_tensor_;
      const std::size_t rank = rank_of(i / num_tensor_, 0, tensor);
      for (const Entry* const entry : ranks_[i].model->below({"module"})) {
        const bool is_plain = entry->path.size() == 2 && entry->kind == Entry::Kind::tensor;
        if (!is_plain) continue;  // not a tensor of the state dict; read elsewhere
        add_of_module({ranks_[i].model, entry, rank, tensor, text_keys({"model", entry->path[1]})});
      }
    }
    for (const auto& [name, parts] : rest_) add_rest(parts);
    note_rounded(rounded_.size());
  }

  void add_of_module(Part part) {
    const std::string name = spell({part.path[1]});
    const auto whole = whole_of_.find(name);
    const bool is_tensor = part.entry->kind == Entry::Kind::tensor && part.path.size() == 2;
    if (whole == whole_of_.end() || !is_tensor) {
      std::string key = spell(part.path);
      rest_[std::move(key)].push_back(std::move(part));
      return;
    }
    const Whole& trained = wholes_[whole->second];
    const TensorMeta& copy = part.file->tensor(*part.entry);
    if (copy.shape != trained.parts[part.tensor]->shape) {
      refuse(*part.file, name, "param_shapes", shape_to_string(trained.parts[part.tensor]->shape),
             shape_to_string(copy.shape));
    }
    std::vector<Run> weights = weights_of(trained, part.tensor);
    if (weights.empty()) return;
    const Run& first = weights.front();
    if (first.file->reader().contents().tensors[first.tensor].meta.dtype != copy.dtype) {
      rounded_.insert(name);
      return;
    }
    copies_.add({name, std::move(weights), {{part.file, part.entry->index, 0, copy.numel()}}});
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
      const Copy both{whole.fqn,
                      weights_of(whole, layer.tensor),
                      {{layer.file, entry->index, 0, copy.numel()}}};
      if (are_equal(both, kNumelThatTells)) return whole.fqn.substr(0, dot + 1);
    }
    return by_number;
  }

  /// Adds an entry that is not trained, such as a buffer. `parts`: its parts or copies on all
  /// tensor ranks, and on all stages that share it.
  void add_rest(const std::vector<Part>& parts) {
    const Part& first = parts.front();
    const bool is_tensor = first.entry->kind == Entry::Kind::tensor && first.path.size() == 2;
    const std::string name = spell({first.path[1]});
    if (cuts_ && is_tensor && is_parameter(name)) {
      const auto is_other = [&](const Part& part) {
        return !torch_files::are_equal(*first.file, *first.entry, *part.file, *part.entry);
      };
      if (cuts_->has_rule(name) || std::ranges::any_of(parts, is_other)) {
        add_frozen(name, parts);
        return;
      }
      without_rule_.push_back(name);
    }
    std::vector<OfRank> ranks;
    for (const Part& part : parts) {
      ranks.push_back({part.file, part.entry, static_cast<int>(part.rank)});
    }
    add_of_ranks(first.path, ranks);
  }

  /// Returns whether a name that is not trained is a frozen parameter (not a buffer).
  bool is_parameter(const std::string& name) const {
    for (std::size_t stage = 0; stage < num_stages(); ++stage) {
      if (at(stage, 0).model->find({"buffer_names"}) == nullptr) return false;
      if (buffers_of(stage).contains(name)) return false;
    }
    return true;
  }

  /// Adds a frozen parameter, joined by the same rules as trained ones.
  void add_frozen(const std::string& name, const std::vector<Part>& parts) {
    std::map<std::size_t, const Part*> first_of;  // by tensor rank
    std::vector<Shape> shapes;
    for (const Part& part : parts) {
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
    const Joint joint = cuts_->join(name, shapes);
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

  void add_replica(const std::string& name, const Part& first, const Part& again) {
    const auto run_of = [](const Part& part) {
      return Run{part.file, part.entry->index, 0, part.file->tensor(*part.entry).numel()};
    };
    replicas_.add({name, {run_of(first)}, {run_of(again)}});
  }

  void add_ties_of_parameters() {
    std::set<std::string> known;
    for (const ModelRank& rank : ranks_) {
      for (const Entry* const entry : rank.model->below({"shared_params"})) {
        const auto target = rank.model->value_of(*entry);
        const auto* const name = target ? target->get_if<std::string>() : nullptr;
        if (entry->path.size() != 2 || name == nullptr || !whole_of_.contains(*name)) continue;
        if (known.insert(entry->path[1]).second) add_alias(entry->path[1], *name);
      }
    }
  }

  void add_members() {
    std::set<std::string> left_out{"ds_config"};
    if (cuts_) left_out.insert(kUniversalCheckpointInfo);
    if (!lists_parameters(model())) left_out.insert("optimizer");
    add_members_of_model_states(left_out);
    std::vector<const File*> optimizer(ranks_.size() * num_data_);
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      for (std::size_t data = 0; data < num_data_; ++data) {
        optimizer[rank_of(i / num_tensor_, data, i % num_tensor_)] = ranks_[i].optimizer[data];
      }
    }
    add_members_beside_state(optimizer, ranks_.front().partition.stage);
    add_configurations(optimizer);
  }

  void note_frozen_without_rule() {
    if (without_rule_.empty()) return;
    note("tensor parallelism", "for each frozen parameter, a rule that says how ranks cut it",
         counted(without_rule_.size(), "name") +
             " without a rule, but equal on all tensor ranks, such as '" +
             printable(without_rule_.front()) + "'; read as the whole parameter");
  }

  void note_padding() {
    if (num_padding_rows_ == 0) return;
    note("padding", "only rows of the vocabulary",
         counted(num_padding_rows_, "name") + " with more rows (padding, left out)");
  }

  static constexpr std::int64_t kNumelThatTells = 8192;

  std::size_t num_tensor_ = 1;
  std::size_t num_data_ = 1;
  std::vector<ModelRank> ranks_;  // by model rank
  std::vector<Layer> layers_;
  std::optional<TensorCuts> cuts_;               // with tensor parallelism
  std::vector<Whole> wholes_;                    // in the order of the optimizer, stage after stage
  std::map<std::string, std::size_t> whole_of_;  // by name, in wholes_
  std::map<std::string, std::vector<Part>> rest_;
  std::set<std::string> rounded_;
  std::vector<std::string> without_rule_;  // frozen parameters, equal on all tensor ranks
  /// By fqn, for tensors that are read as the mean of the tensor ranks' parts: the parts of each
  /// tensor rank.
  std::map<std::string, std::vector<std::vector<VectorPart>>> averaged_;
  std::size_t num_padding_rows_ = 0;
  Copies copies_{"copies", "copies in the module that equal the fp32 master weights",
                 "the master weights are read"};
  Copies replicas_{"replicas", "equal copies of a parameter on all ranks that have it",
                   "the copies of the first rank are read"};
};

}  // namespace

std::unique_ptr<CheckpointReader> open_parallel(const FileSystem& fs, std::string path,
                                                std::string folder,
                                                const std::vector<std::string>& as_dict) {
  return std::make_unique<ParallelReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats::deepspeed
