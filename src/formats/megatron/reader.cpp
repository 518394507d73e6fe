#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "base/checked_math.h"
#include "base/size_text.h"
#include "formats/drivers.h"
#include "formats/megatron.h"
#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/layer_numbers.h"
#include "formats/megatron/model_parts.h"
#include "formats/megatron/optimizer.h"
#include "formats/megatron/rank_folders.h"
#include "formats/torch_files/copies.h"
#include "formats/torch_files/entry_reader.h"
#include "formats/torch_zip/equal_bytes.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using megatron::Cut;
using megatron::Elements;
using megatron::Joint;
using megatron::Parameter;
using megatron::ParamGroup;
using megatron::Part;
using megatron::PartState;
using megatron::Place;
using megatron::RankFolders;
using megatron::RankModel;
using megatron::RankOptimizer;
using megatron::SecondNumber;
using torch_files::Entry;
using torch_files::EntryReader;
using torch_files::File;
using torch_files::Path;
using torch_files::refuse;
using torch_files::text_keys;

constexpr std::uint64_t kMaxTrackerNbytes = 4096;
// What Megatron writes beside the flat vectors: sizes that follow from the model and the ranks.
constexpr std::array<std::string_view, 4> kBesideVectors{
    "buckets_coalesced", "numel_unpadded", "per_bucket_numel", "per_bucket_numel_unpadded"};

/// A Megatron file holds the run's arguments as an object of argparse.Namespace, which is read as a
/// dict.
const torch_files::Family& family() {
  static const torch_files::Family kFamily{.format = megatron_driver().format(),
                                           .records = {"argparse.Namespace"},
                                           .own_names = {"argparse.Namespace", "megatron."},
                                           .check = nullptr,
                                           .keeps_key_order = true};
  return kFamily;
}

bool starts_with(const Path& path, const Path& begin) {
  return path.size() >= begin.size() && std::equal(begin.begin(), begin.end(), path.begin());
}

bool is_trained(const Parameter& tensor) {
  const DType dtype = tensor.meta().dtype;
  return is_floating_point(dtype) && !megatron::is_buffer(tensor.name);
}

class MegatronReader final : public EntryReader {
 public:
  MegatronReader(const FileSystem& fs, std::string path, std::string folder,
                 const std::vector<std::string>& as_dict)
      : EntryReader(fs, std::move(path), std::move(folder), as_dict, family()), fs_(fs) {
    open_files();
    require_one_save();
    require_own_folders();
    for (std::size_t i = 0; i < files_.size(); ++i) {
      ranks_.push_back(megatron::read_rank_model(*files_[i], folders_.place_of(i)));
    }
    require_order_of_stages();
    const megatron::LayerNumbers layer_numbers(ranks_, folders_);
    layer_numbers_ = &layer_numbers;
    set_world_size(files_.size());
    gather();
    read_optimizers();
    for (const auto& [name, parts] : parts_) add_whole(name, parts);
    if (has_optimizer() && problem_.empty()) add_groups();
    if (!problem_.empty()) add_refused(text_keys({"optim"}), refusal("optim", problem_));
    add_rest();
    note_copies();
    note_weights_without_state();
    note_without_rule();
    note_order_of_rows();
    note_layers_without_tensors();
    note_values_beside_vectors();
    finish();
    compare(copies_);
    layer_numbers_ = nullptr;
    parts_.clear();
  }

  /// The value `optim` says `unsupported` for each problem, so that a move can advise to leave it
  /// out. For a check, this would be only a note.
  void verify_part(const FindingSink& sink, const ProgressSink& progress, int num_threads,
                   PartOfCheck& part) const override {
    EntryReader::verify_part(sink, progress, num_threads, part);
    if (!part.takes(0) || damage_.empty()) return;
    sink({.severity = Finding::Severity::error,
          .rule = "structure",
          .where = {.path = folder(), .fqn = "optim"},
          .expected = "the optimizer state of the model's parameters",
          .found = damage_});
  }

 private:
  Error refusal(const std::string& name, const std::string& reason) const {
    return Error(ErrorKind::unsupported, {.path = folder(), .fqn = name}, reason);
  }

  // --- files

  void open_files() {
    const std::vector<std::string> names = fs_.list_directory(folder());
    const auto first = std::ranges::find_if(names, megatron::is_rank_folder);
    TESSERA_CHECK(first != names.end());
    const File& file = open_model(*first);
    require_one_tensor_size(file);
    const auto is_more_than_one = [&](const char* size) {
      return file.number_at({"args", size}).value_or(1) > 1;
    };
    const bool is_expert = is_more_than_one("expert_model_parallel_size") &&
                           !is_more_than_one("pipeline_model_parallel_size");
    folders_ = megatron::find_rank_folders(names, folder(),
                                           is_expert ? SecondNumber::expert : SecondNumber::stage);
    for (const std::string& name : folders_.names) {
      files_.push_back(name == *first ? &file : &open_model(name));
      const std::string vectors = join_path(name, std::string(megatron::kOptimizerFile));
      const bool has_vectors = fs_.kind_of(join_path(folder(), vectors)).has_value();
      vectors_.push_back(has_vectors ? &open_file(vectors) : nullptr);
      look_for_other_optimizer(name);
    }
  }

  const File& open_model(const std::string& name) {
    const std::string file = join_path(name, std::string(megatron::kModelFile));
    if (fs_.kind_of(join_path(folder(), file))) return open_file(file);
    throw Error::expected(ErrorKind::corruption, {.path = join_path(folder(), name)},
                          "files of ranks", std::string(megatron::kModelFile), "none",
                          "saved before Megatron core 0.5, or not copied from its host?");
  }

  void look_for_other_optimizer(const std::string& name) {
    for (const std::string& file : fs_.list_directory(join_path(folder(), name))) {
      if (!file.starts_with("layer_wise_optimizer_")) continue;
      problem_ = "state of the layer-wise optimizer in " + join_path(name, file);
    }
  }

  /// Refuses a run whose experts and other layers are cut among different numbers of
  /// tensor-parallel ranks: folder names then do not show which part of an expert a rank has.
  static void require_one_tensor_size(const File& file) {
    const auto size = file.number_at({"args", "tensor_model_parallel_size"});
    const auto of_experts = file.number_at({"args", "expert_tensor_parallel_size"});
    const bool has_experts = file.number_at({"args", "num_experts"}).value_or(0) > 0;
    if (!has_experts || !size || !of_experts || *size == *of_experts) return;
    throw Error::expected(ErrorKind::unsupported, {.path = file.reader().path()},
                          "expert_tensor_parallel_size",
                          std::to_string(*size) + ", the same as tensor_model_parallel_size",
                          std::to_string(*of_experts));
  }

  void require_one_save() const {
    for (const File* const file : files_) {
      for (const char* const member : {"iteration", "checkpoint_version"}) {
        const auto expected = files_.front()->value_at({member});
        const auto found = file->value_at({member});
        if (found == expected) continue;
        refuse(
            *file, member, member,
            (expected ? value_to_string(*expected) : "none") + ", as in " + files_.front()->name(),
            found ? value_to_string(*found) : "none");
      }
      const auto& sizes = folders_.sizes;
      require_size(*file, "tensor_model_parallel_size", sizes.tensor);
      require_size(*file, "pipeline_model_parallel_size", sizes.stage);
      require_size(*file, "expert_model_parallel_size", sizes.expert);
    }
  }

  /// Throws if `args.rank` shows that a file is not of its folder's tensor rank, stage or expert
  /// rank, or if two folders have the file of one rank. If `args.rank` is the same in all files, as
  /// converters write it, the files cannot be checked, and a note says so.
  void require_own_folders() {
    std::map<std::int64_t, const File*> first_of;
    for (const File* const file : files_) {
      if (const auto rank = file->number_at({"args", "rank"})) first_of.emplace(*rank, file);
    }
    if (first_of.size() == 1 && files_.size() > 1) {
      note("ranks", "in args.rank, the rank that saved the file",
           std::to_string(first_of.begin()->first) +
               " in all files (so this reader cannot notice a file in another rank's folder)");
    }
    if (first_of.size() <= 1) return;
    const auto num_ranks = static_cast<std::int64_t>(folders_.sizes.tensor);
    for (std::size_t i = 0; i < files_.size(); ++i) {
      const auto rank = files_[i]->number_at({"args", "rank"});
      if (!rank) continue;
      const auto expected = static_cast<std::int64_t>(folders_.place_of(i).tensor);
      if (*rank < 0 || *rank % num_ranks != expected) {
        refuse(*files_[i], "args.rank", "folder of a rank",
               "a file that tensor rank " + std::to_string(expected) + " of " +
                   std::to_string(num_ranks) + " saved",
               "the file of rank " + std::to_string(*rank));
      }
      // The ranks of one tensor rank rise with the stage and with the expert rank in both of
      // Megatron's orders (use_tp_pp_dp_mapping), as data-parallel rank 0 saves the files.
      const File* const before =
          i < folders_.sizes.tensor ? nullptr : files_[i - folders_.sizes.tensor];
      const auto rank_before =
          before == nullptr ? std::nullopt : before->number_at({"args", "rank"});
      if (rank_before && *rank < *rank_before) {
        refuse(*files_[i], "args.rank", "folder of a rank",
               "a rank above " + std::to_string(*rank_before) + ", that of " + before->name(),
               "the file of rank " + std::to_string(*rank));
      }
      if (first_of.at(*rank) != files_[i]) {
        refuse(*files_[i], "args.rank", "folder of a rank", "a rank's file in one folder only",
               "the file of rank " + std::to_string(*rank) + ", which is also in " +
                   first_of.at(*rank)->name());
      }
    }
  }

  /// Throws if a later stage has the begin of the model, or an earlier one its end: their folders
  /// were swapped. Stages that predict further tokens (`mtp.`) have embeddings too, and then the
  /// final norm may be on an earlier stage; a model with an encoder has two begins.
  void require_order_of_stages() const {
    const auto has = [&](std::string_view prefix) {
      return std::ranges::any_of(ranks_, [&](const RankModel& rank) {
        return std::ranges::any_of(
            rank.tensors, [&](const Parameter& each) { return each.name.starts_with(prefix); });
      });
    };
    if (folders_.sizes.stage == 1 || has("mtp.") || has("encoder.")) return;
    for (const RankModel& rank : ranks_) {
      for (const Parameter& tensor : rank.tensors) {
        const bool is_begin = tensor.name.starts_with("embedding.");
        const bool is_end = tensor.name.starts_with("output_layer.") ||
                            tensor.name.starts_with("decoder.final_layernorm.");
        const std::size_t stage = is_begin ? 0 : folders_.sizes.stage - 1;
        if ((!is_begin && !is_end) || rank.place.stage == stage) continue;
        refuse(*rank.file, "model." + tensor.name, "folder of a rank",
               std::string("it on the ") + (is_begin ? "first" : "last") + " stage, " +
                   std::to_string(stage),
               "it on stage " + std::to_string(rank.place.stage));
      }
    }
  }

  void require_size(const File& file, const std::string& argument, std::size_t found) const {
    const auto stated = file.number_at({"args", argument});
    if (!stated || *stated == static_cast<std::int64_t>(found)) return;
    refuse(file, "args." + argument, "folders of ranks", std::to_string(*stated),
           std::to_string(found) + ", as the names of the folders show");
  }

  // --- the optimizer

  bool has_optimizer() const { return std::ranges::any_of(optimizers_, &RankOptimizer::is_there); }

  void read_optimizers() {
    const bool is_other_optimizer = !problem_.empty();  // whose state is in other files
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      std::vector<std::size_t> trained;
      std::vector<Parameter> parameters;
      for (std::size_t t = 0; t < ranks_[i].tensors.size(); ++t) {
        if (!is_trained(ranks_[i].tensors[t])) continue;
        trained.push_back(t);
        parameters.push_back(ranks_[i].tensors[t]);
      }
      RankOptimizer optimizer = megatron::read_optimizer(*files_[i], vectors_[i], parameters);
      if (!optimizer.problem.empty() && optimizer.is_there && !is_other_optimizer) {
        const std::string problem =
            "state of unknown parameters in " + files_[i]->name() + ": " + optimizer.problem;
        if (problem_.empty()) problem_ = problem;
        if (optimizer.is_damaged && damage_.empty()) damage_ = problem;
      }
      std::map<std::size_t, PartState> parts;
      for (auto& [number, part] : optimizer.parts) parts.emplace(trained[number], std::move(part));
      optimizer.parts = std::move(parts);
      for (ParamGroup& group : optimizer.groups) {
        for (std::size_t& number : group.parameters) number = trained[number];
      }
      optimizers_.push_back(std::move(optimizer));
    }
    if (problem_.empty()) require_state_of_all();
    if (problem_.empty()) return;
    for (RankOptimizer& optimizer : optimizers_) optimizer.parts.clear();
  }

  /// Sets `problem_` and `damage_` if the distributed optimizer's files lack the state of a
  /// parameter. They have that of all, because a frozen parameter would change the lengths of the
  /// vectors.
  void require_state_of_all() {
    const auto has_state = [&](const Part& part) { return state_of(part) != nullptr; };
    if (std::ranges::all_of(vectors_, [](const File* file) { return file == nullptr; })) return;
    for (const auto& [name, parts] : parts_) {
      if (!is_trained(tensor_of(parts.front()))) continue;
      std::map<std::size_t, std::vector<Part>> by_tensor_rank;
      for (const Part& part : parts) {
        by_tensor_rank[folders_.place_of(part.rank).tensor].push_back(part);
      }
      for (const auto& [tensor_rank, same] : by_tensor_rank) {
        if (std::ranges::any_of(same, has_state)) continue;
        problem_ = "no state of '" + printable(name) + "' in ";
        for (const Part& part : same) {
          problem_ += (part.rank == same.front().rank ? "" : ", ") +
                      join_path(folders_.names[part.rank], std::string(megatron::kOptimizerFile));
        }
        damage_ = problem_;
        return;
      }
    }
  }

  const PartState* state_of(const Part& part) const {
    const auto& parts = optimizers_[part.rank].parts;
    const auto found = parts.find(part.tensor);
    return found == parts.end() ? nullptr : &found->second;
  }

  // --- the model

  const Parameter& tensor_of(const Part& part) const {
    return ranks_[part.rank].tensors[part.tensor];
  }

  std::string name_of(const Part& part) const {
    const Parameter& tensor = tensor_of(part);
    return layer_numbers_->name_of(part.rank, tensor.chunk, tensor.name);
  }

  void gather() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (std::size_t t = 0; t < ranks_[rank].tensors.size(); ++t) {
        const Part part{rank, t};
        parts_[name_of(part)].push_back(part);
      }
    }
  }

  void add_whole(const std::string& name, const std::vector<Part>& parts) {
    std::string reason;
    const auto joint = joint_of(name, parts, reason);
    if (!joint) {
      const std::string entry = spell({"model", name});
      add_refused(text_keys({"model", name}), refusal(entry, reason));
      if (std::ranges::any_of(parts, [&](const Part& part) { return state_of(part) != nullptr; })) {
        add_refused(text_keys({"optim", "state", name}), refusal(entry, reason));
      }
      return;
    }
    const auto has_weights = [&](const Part& part) {
      return state_of(part) != nullptr && state_of(part)->weights.has_value();
    };
    const bool has_masters = std::ranges::any_of(parts, has_weights);
    const DType dtype = tensor_of(parts.front()).meta().dtype;
    num_copies_ += std::size_t{has_masters && dtype != DType::float32};
    torch_files::Copy copy{.fqn = spell({"model", name}), .read = {}, .left_out = {}};
    for (const Part& part : parts) {
      if (!has_weights(part)) continue;
      const Elements& weights = *state_of(part)->weights;
      const Parameter& left_out = tensor_of(part);
      const std::int64_t numel = left_out.meta().numel();
      copy.read.push_back({&weights.file->reader(), weights.tensor, weights.begin, numel});
      copy.left_out.push_back({&left_out.file->reader(), left_out.entry->index, 0, numel});
    }
    if (has_masters) copies_.add(std::move(copy));
    const Parameter& first = tensor_of(parts.front());
    const std::uint32_t order = order_in(*first.file, first.entry->dict_order);
    add_joined({"model", name}, order, parts, *joint,
               [&](const Part& part) -> std::optional<Elements> {
                 if (has_masters) return has_weights(part) ? state_of(part)->weights : std::nullopt;
                 return Elements{tensor_of(part).file, tensor_of(part).entry->index};
               });
    add_state(name, parts, *joint);
  }

  /// Returns how the ranks' parts of a tensor make the whole tensor. If this is not known, returns
  /// nothing and sets `reason`.
  std::optional<Joint> joint_of(const std::string& name, const std::vector<Part>& parts,
                                std::string& reason) {
    const Shape& shape = tensor_of(parts.front()).meta().shape;
    const std::size_t num_parts = folders_.sizes.tensor;
    Cut cut = megatron::cut_of(name);
    const bool is_grouped =
        folders_.sizes.expert > 1 && megatron::is_of_expert(name) && !megatron::expert_in(name);
    const bool is_one = num_parts == 1 && !is_grouped;
    if (cut == Cut::no_rule && is_part_of_down_projection(name, shape)) cut = Cut::first_dimension;
    if (is_other_head(name, shape)) cut = Cut::no_rule;
    const bool is_cut = cut == Cut::first_dimension || cut == Cut::second_dimension;
    if (is_cut && !is_one && !is_grouped && is_whole_on_each(name, parts)) cut = Cut::no_rule;
    if (is_one) cut = Cut::whole;
    if (is_grouped || cut == Cut::not_joined) {
      reason = "a tensor with parts of several matrices, which Tessera does not join";
      return std::nullopt;
    }
    if (cut == Cut::no_rule) {
      if (const auto other = other_than_first(parts)) {
        reason = "a tensor that no rule says how to join, with different elements in " +
                 tensor_of(*other).file->name() + " and in " +
                 tensor_of(parts.front()).file->name();
        return std::nullopt;
      }
      if (has_other_state(parts)) {
        reason =
            "a tensor that no rule says how to join, with different optimizer state on the tensor "
            "ranks";
        return std::nullopt;
      }
      without_rule_.push_back(name);
      cut = Cut::whole;
    }
    const std::int64_t num_matrices =
        cut == Cut::first_dimension ? num_matrices_in(name, parts.front()) : 1;
    auto joint = megatron::join(cut, num_matrices, num_parts, shape);
    if (!joint) {
      reason = "parts of shape " + shape_to_string(shape) + ", which no cut among " +
               counted(num_parts, "tensor rank") + " gives";
    }
    return joint;
  }

  std::optional<Part> other_than_first(const std::vector<Part>& parts) const {
    const Parameter& first = tensor_of(parts.front());
    const auto other = std::ranges::find_if(parts, [&](const Part& part) {
      const Parameter& tensor = tensor_of(part);
      return !are_equal(*first.file, *first.entry, *tensor.file, *tensor.entry);
    });
    return other == parts.end() ? std::nullopt : std::optional(*other);
  }

  /// Whether all ranks have the same elements of a tensor that its name says is cut: then it is of
  /// a module that each rank has as a whole, such as a vision tower of transformers with layers
  /// `linear_fc1`. Parts that are one number everywhere, such as zeros, show nothing; then the
  /// weights of this layer and of those beside it in the same module do.
  bool is_whole_on_each(const std::string& name, const std::vector<Part>& parts) const {
    if (other_than_first(parts)) return false;
    if (!is_one_number(parts.front())) return true;
    const std::string layer = name.substr(0, name.rfind('.'));
    const std::string module = layer.substr(0, layer.rfind('.') + 1);  // npos + 1 is 0
    if (module.empty()) return false;
    for (auto other = parts_.lower_bound(module);
         other != parts_.end() && other->first.starts_with(module); ++other) {
      const std::string_view within = std::string_view(other->first).substr(module.size());
      const bool is_weight = within.ends_with(".weight") && std::ranges::count(within, '.') == 1;
      const Cut cut = megatron::cut_of(other->first);
      const bool is_cut = cut == Cut::first_dimension || cut == Cut::second_dimension;
      if (!is_weight || !is_cut || is_one_number(other->second.front())) continue;
      if (!other_than_first(other->second)) return true;
    }
    return false;
  }

  /// Whether all elements of a part are equal, or there are none.
  bool is_one_number(const Part& part) const {
    constexpr std::int64_t kBlockNumel = std::int64_t{1} << 16;
    const Parameter& tensor = tensor_of(part);
    const std::int64_t numel = tensor.meta().numel();
    const std::size_t size = itemsize(tensor.meta().dtype);
    std::vector<std::byte> first;
    std::vector<std::byte> block;
    for (std::int64_t begin = 0; begin < numel; begin += kBlockNumel) {
      const std::int64_t end = std::min(begin + kBlockNumel, numel);
      block.resize(static_cast<std::size_t>(end - begin) * size);
      tensor.file->reader().read_piece(tensor.entry->index, 0, {begin, end}, block);
      if (first.empty())
        first.assign(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(size));
      for (std::size_t at = 0; at < block.size(); at += size) {
        if (!std::equal(first.begin(), first.end(),
                        block.begin() + static_cast<std::ptrdiff_t>(at))) {
          return false;
        }
      }
    }
    return true;
  }

  /// Whether parts have optimizer state that differs from the first part's. State in flat vectors
  /// is not compared.
  bool has_other_state(const std::vector<Part>& parts) const {
    const PartState* const first = state_of(parts.front());
    return first != nullptr && std::ranges::any_of(parts, [&](const Part& part) {
             const PartState* const state = state_of(part);
             if (state == nullptr) return false;
             return std::ranges::any_of(state->tensors, [&](const auto& each) {
               const auto same = first->tensors.find(each.first);
               if (same == first->tensors.end()) return true;
               const Joint whole{Cut::whole, 1, 1, tensor_of(part).meta().shape, {}};
               return !are_equal_parts(same->second, each.second, whole);
             });
           });
  }

  std::int64_t argument(const char* name) const {
    return files_.front()->number_at({"args", name}).value_or(0);
  }

  /// Whether a tensor is of an output layer that makes something else than the words of the
  /// vocabulary, so that a part of its rows is not a rank's part of the vocabulary. The value head
  /// of a critic or a reward model has one row, which all tensor ranks have.
  bool is_other_head(const std::string& name, const Shape& part) const {
    if (!megatron::is_of_module(name, "output_layer") || part.empty()) return false;
    const auto num_ranks = static_cast<std::int64_t>(folders_.sizes.tensor);
    std::set<std::int64_t> known_rows;  // of one rank's part of the vocabulary
    if (const std::int64_t size = argument("padded_vocab_size"); size > 0) {
      known_rows.insert(size / num_ranks);
    }
    for (const auto& [other, parts] : parts_) {
      const Shape& shape = tensor_of(parts.front()).meta().shape;
      if (megatron::is_of_module(other, "word_embeddings") && !shape.empty()) {
        known_rows.insert(shape[0]);
      }
    }
    return !known_rows.empty() && !known_rows.contains(part[0]);
  }

  /// Whether a tensor is a part of a down projection of latent attention. Megatron cuts it among
  /// the tensor ranks or not, depending on the layers' implementation: `args` has the whole size.
  bool is_part_of_down_projection(const std::string& name, const Shape& part) const {
    std::int64_t num_rows = 0;
    if (megatron::is_of_module(name, "linear_q_down_proj")) num_rows = argument("q_lora_rank");
    if (megatron::is_of_module(name, "linear_kv_down_proj")) {
      num_rows = checked_add(argument("kv_lora_rank"), argument("qk_pos_emb_head_dim")).value_or(0);
    }
    return !part.empty() && part[0] < num_rows &&
           part[0] == num_rows / static_cast<std::int64_t>(folders_.sizes.tensor);
  }

  /// Returns the number of rows after which rows of the gate and of the up projection take turns in
  /// the first layer of an expert's MLP; 0 if all rows of the gate come first.
  std::int64_t num_interleaved_rows(const std::string& name) const {
    if (!megatron::second_of_perceptron(name)) return 0;
    if (megatron::is_of_expert(name)) return argument("moe_mlp_glu_interleave_size");
    if (!megatron::is_of_shared_expert(name)) return 0;
    return argument("moe_shared_expert_glu_interleave_size");
  }

  /// Returns the number of matrices of which each rank has a part, one after the other.
  std::int64_t num_matrices_in(const std::string& name, const Part& part) const {
    if (is_gated(name, part) && num_interleaved_rows(name) == 0) return 2;
    return checkpoint_version() == 0 ? num_projections(name) : 1;
  }

  /// Returns the number of projections in a fused tensor of the attention of older versions, whose
  /// rows have another order in each `checkpoint_version`: 3 for `query_key_value`, 2 for
  /// `key_value`. 1 for all other tensors.
  static std::int64_t num_projections(const std::string& name) {
    if (megatron::is_of_module(name, "query_key_value")) return 3;
    return megatron::is_of_module(name, "key_value") ? 2 : 1;
  }
  /// Returns the member `checkpoint_version`. Without it, the version is 0, as in Megatron.
  double checkpoint_version() const {
    const auto version = files_.front()->value_at({"checkpoint_version"});
    if (!version) return 0;
    if (const auto* const integer = version->get_if<std::int64_t>()) {
      return static_cast<double>(*integer);
    }
    const auto* const real = version->get_if<double>();
    return real == nullptr ? 0 : *real;
  }

  /// Whether a tensor is the first layer of a gated MLP (second_of_perceptron).
  bool is_gated(const std::string& name, const Part& part) const {
    const auto second = megatron::second_of_perceptron(name);
    const auto found = second ? parts_.find(*second) : parts_.end();
    if (found == parts_.end()) return false;
    const Shape& rows = tensor_of(part).meta().shape;
    const Shape& columns = tensor_of(found->second.front()).meta().shape;
    return !rows.empty() && columns.size() == 2 && rows[0] % 2 == 0 && rows[0] / 2 == columns[1];
  }

  /// Adds a whole tensor that consists of the ranks' parts. `source_of` returns the elements of a
  /// part; nothing if the rank has none, because another rank has the same part. `order`: the
  /// tensor's `dict_order`; without a value, the part with the first elements gives the order.
  template <class SourceOf>
  void add_joined(const Path& path, std::optional<std::uint32_t> order,
                  const std::vector<Part>& parts, const Joint& joint, const SourceOf& source_of) {
    Tensor tensor = named(text_keys(path));
    tensor.entry.meta.shape = joint.whole;
    std::set<std::size_t> tensor_ranks;
    std::map<Box, Elements> first_of;
    bool has_other = false;
    for (const Part& part : parts) {
      const std::optional<Elements> source = source_of(part);
      if (!source) continue;
      const std::size_t tensor_rank = folders_.place_of(part.rank).tensor;
      if (tensor_ranks.empty()) {
        tensor.entry.meta.dtype = source->dtype();
        tensor.entry.dict_order = order ? *order : order_in(*source->file, source->dict_order());
      }
      if (source->dtype() != tensor.entry.meta.dtype) {
        refuse(*source->file, tensor.entry.meta.fqn, "dtype",
               std::string(dtype_name(tensor.entry.meta.dtype)),
               std::string(dtype_name(source->dtype())));
      }
      tensor_ranks.insert(tensor_rank);
      for (const Joint::Piece& piece : joint.pieces_of(tensor_rank)) {
        const auto [first, is_new] = first_of.emplace(piece.region, *source);
        if (!is_new && !are_equal_parts(first->second, *source, joint)) {
          has_other = true;  // only the first one is read
          continue;
        }
        tensor.entry.pieces.push_back({piece.region, static_cast<int>(part.rank)});
        tensor.pieces.push_back({source->file, source->tensor, source->begin + piece.begin});
      }
    }
    if (has_other) note_replicas(tensor.entry.meta.fqn);
    if (tensor_ranks.size() != folders_.sizes.tensor) {
      refuse(*tensor_of(parts.front()).file, tensor.entry.meta.fqn, "parts of ranks",
             "parts of " + std::to_string(folders_.sizes.tensor) + " tensor ranks",
             "parts of " + std::to_string(tensor_ranks.size()));
    }
    add(std::move(tensor));
  }

  /// Whether two parts have equal bytes. Compares only parts that are whole tensors of their files;
  /// other parts count as equal.
  static bool are_equal_parts(const Elements& a, const Elements& b, const Joint& joint) {
    const auto meta_of = [](const Elements& elements) -> const TensorMeta& {
      return elements.file->reader().contents().tensors[elements.tensor].meta;
    };
    if (meta_of(a).shape != joint.part || meta_of(b).shape != joint.part) return true;
    return torch_zip::are_equal(a.file->reader(), a.tensor, b.file->reader(), b.tensor);
  }

  void note_replicas(const std::string& name) {
    note("replicas", "equal bytes on all ranks that have the same part",
         "'" + printable(name) +
             "' with other bytes on some rank (the bytes of the first rank are read)");
  }

  void add_state(const std::string& name, const std::vector<Part>& parts, const Joint& joint) {
    std::set<std::string> kinds;
    std::map<std::string, Part> scalars;
    for (const Part& part : parts) {
      const PartState* const state = state_of(part);
      if (state == nullptr) continue;
      for (const auto& [kind, elements] : state->tensors) kinds.insert(kind);
      for (const auto& [kind, entry] : state->scalars) {
        const auto [first, is_new] = scalars.emplace(kind, part);
        if (is_new) continue;
        const Parameter& of_first = tensor_of(first->second);
        const Entry& expected = *state_of(first->second)->scalars.at(kind);
        if (are_equal(*of_first.file, expected, *tensor_of(part).file, *entry)) continue;
        refuse(*tensor_of(part).file, spell({"optim", "state", name, kind}), kind,
               "the value in " + of_first.file->name(), "another value");
      }
    }
    for (const std::string& kind : kinds) {
      add_joined({"optim", "state", name, kind}, std::nullopt, parts, joint,
                 [&](const Part& part) -> std::optional<Elements> {
                   const PartState* const state = state_of(part);
                   if (state == nullptr || !state->tensors.contains(kind)) return std::nullopt;
                   return state->tensors.at(kind);
                 });
    }
    for (const auto& [kind, part] : scalars) {
      const File& file = *tensor_of(part).file;
      const Entry& entry = *state_of(part)->scalars.at(kind);
      KeyPath path = text_keys({"optim", "state", name, kind});
      const int rank = static_cast<int>(part.rank);
      if (kind == "step") {
        add_step(std::move(path), file, entry, rank);
      } else {
        add_entry(std::move(path), file, entry, rank);
      }
    }
  }

  // --- values

  void add_groups() {
    std::map<std::size_t, Value::List> names;
    std::map<std::size_t, std::set<std::string>> known;
    std::map<std::size_t, std::uint32_t> orders;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const auto& groups = optimizers_[rank].groups;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        if (!groups[g].lists_parameters) continue;
        Value::List& list = names[g];
        orders.emplace(g, order_of_list(*files_[rank], groups[g].path));
        for (const std::size_t tensor : groups[g].parameters) {
          std::string name = name_of({rank, tensor});
          if (known[g].insert(name).second) list.emplace_back(std::move(name));
        }
      }
    }
    for (auto& [group, list] : names) {
      add_value({"optim", "param_groups", static_cast<std::int64_t>(group), "params"},
                Value(std::move(list)), orders.at(group));
    }
    add_of_each_rank(files_, [&](std::size_t rank, const Entry& entry) {
      const auto& groups = optimizers_[rank].groups;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        const Path& path = groups[g].path;
        if (entry.path.size() == path.size() || !starts_with(entry.path, path)) continue;
        if (groups[g].lists_parameters && entry.path[path.size()] == "params") return Place{};
        KeyPath target{"optim", "param_groups", static_cast<std::int64_t>(g)};
        target.insert(target.end(), entry.keys.begin() + static_cast<std::ptrdiff_t>(path.size()),
                      entry.keys.end());
        return Place(std::move(target), 3);
      }
      return Place{};
    });
  }

  /// Returns the `dict_order` of a group's list `params`.
  std::uint32_t order_of_list(const File& file, Path path) const {
    path.emplace_back("params");
    const Entry* entry = file.find(path);
    if (const auto below = file.below(path); entry == nullptr && !below.empty()) {
      entry = below.front();
    }
    return entry == nullptr ? 0 : order_in(file, entry->dict_order);
  }

  /// Adds all other entries of the files: everything but the model's tensors and optimizer state.
  void add_rest() {
    add_of_each_rank(files_, [&](std::size_t rank, const Entry& entry) {
      if (const auto chunk = megatron::chunk_number(entry.path.front())) {
        const bool is_whole_chunk = entry.path.size() < 2;  // an empty dict
        const bool is_tensor =
            entry.kind == Entry::Kind::tensor && !megatron::is_extra_state(entry.path);
        if (is_whole_chunk || is_tensor) return Place{};
        const std::string name = megatron::name_on_rank(entry.path);
        return Place({"model", layer_numbers_->name_of(rank, *chunk, name)}, 1);
      }
      for (const Path& path : optimizers_[rank].state_paths) {
        if (starts_with(entry.path, path)) return Place{};
      }
      return Place(entry.keys);
    });
  }

  void note_copies() {
    if (num_copies_ == 0) return;
    note("copies", "each parameter once",
         counted(num_copies_, "parameter") +
             " also in the dtype of the model (the fp32 weights of the optimizer are read)");
  }

  /// Notes weights that are less exact than usual. The value `optim` does not tell it to a move of
  /// the model alone.
  void note_weights_without_state() {
    if (problem_.empty()) return;
    const auto num_rounded = std::ranges::count_if(parts_, [&](const auto& each) {
      const Parameter& tensor = tensor_of(each.second.front());
      return is_trained(tensor) && itemsize(tensor.meta().dtype) < itemsize(DType::float32);
    });
    if (num_rounded == 0) return;
    note("copies", "the fp32 weights of the optimizer",
         problem_ + "; so " + counted(static_cast<std::uint64_t>(num_rounded), "parameter") +
             (num_rounded == 1 ? " is" : " are") + " read from the model, in its dtype");
  }

  void note_without_rule() {
    if (without_rule_.empty()) return;
    note("tensor parallelism", "for each tensor, a rule that says how ranks cut it",
         counted(without_rule_.size(), "name") +
             " without a rule, but equal on all tensor ranks, such as '" +
             printable(without_rule_.front()) + "'; read as the whole tensor");
    without_rule_ = {};
  }

  /// Notes tensors whose rows have another order than in other checkpoints.
  void note_order_of_rows() {
    std::vector<std::string> interleaved;
    std::vector<std::string> fused;
    for (const auto& [name, parts] : parts_) {
      if (num_interleaved_rows(name) > 0) interleaved.push_back(name);
      if (num_projections(name) > 1 && checkpoint_version() < 2) fused.push_back(name);
    }
    if (!interleaved.empty()) {
      note("order of rows", "all rows of the gate before those of the up projection",
           counted(interleaved.size(), "tensor") + " in which they take turns every " +
               counted(static_cast<std::uint64_t>(num_interleaved_rows(interleaved.front())),
                       "row") +
               ", such as '" + printable(interleaved.front()) +
               "'; the order is kept, but a recipe with \"megatron\" puts the gate first");
    }
    if (!fused.empty()) {
      note("order of rows", "checkpoint_version 2 or later",
           "version " + std::string(checkpoint_version() == 0 ? "0" : "1") + ", in which rows of " +
               counted(fused.size(), "tensor") + " have another order, such as '" +
               printable(fused.front()) + "'; the order is kept");
    }
  }

  /// A layer without tensors, such as one that does nothing, leaves a gap in the model's numbers
  /// that the files do not show.
  void note_layers_without_tensors() {
    const auto stated = files_.front()->number_at({"args", "num_layers"});
    const auto found = layer_numbers_->num_layers();
    if (!stated || !found || std::cmp_equal(*stated, *found)) return;
    note("layers",
         "tensors in each of the " + std::to_string(*stated) + " layers of args.num_layers",
         "layers with tensors: " + std::to_string(*found) +
             "; they are numbered one after the other");
  }

  /// Notes values that lie beside the flat vectors of the distributed optimizer. None and an empty
  /// dict are no such values: they stand where another rank has saved an optimizer's vectors.
  void note_values_beside_vectors() {
    std::vector<std::string> names;
    const auto is_known = [](const std::string& key) {
      return std::ranges::find(kBesideVectors, key) != kBesideVectors.end();
    };
    for (const File* const file : vectors_) {
      if (file == nullptr) continue;
      for (const Entry& entry : file->entries()) {
        const auto value = file->value_of(entry);
        const bool is_empty = value && (*value == Value() || *value == Value(Value::Dict()));
        const bool is_kept = entry.kind == Entry::Kind::tensor || is_empty;
        if (is_kept || std::ranges::any_of(entry.path, is_known)) continue;
        names.push_back("'" + printable(spell(entry.keys)) + "' in " + file->name());
      }
    }
    if (names.empty()) return;
    note("members", "only flat vectors in " + std::string(megatron::kOptimizerFile),
         counted(names.size(), "value") + " beside them, such as " + names.front() + ": left out");
  }

  const FileSystem& fs_;
  RankFolders folders_;
  std::vector<const File*> files_;    // indexed by rank
  std::vector<const File*> vectors_;  // indexed by rank; null: none
  std::vector<RankModel> ranks_;
  std::vector<RankOptimizer> optimizers_;  // indexed by rank
  std::string problem_;                    // why optimizer state is not read; empty: it is read
  std::string damage_;                     // the first problem that is the fault of the files
  std::size_t num_copies_ = 0;
  // Tensors of which all tensor ranks have the same; only while opening.
  std::vector<std::string> without_rule_;
  torch_files::Copies copies_{"copies",
                              "weights in the model that equal the optimizer's fp32 weights",
                              "the fp32 weights of the optimizer are read"};
  // Only while opening.
  const megatron::LayerNumbers* layer_numbers_ = nullptr;
  std::map<std::string, std::vector<Part>> parts_;  // key: name in the whole model
};

bool has_ranks(const std::vector<std::string>& names) {
  return std::ranges::any_of(names, megatron::is_rank_folder);
}

/// Throws the error for the folder of a run whose newest checkpoint is missing or not in this
/// format. The message names a checkpoint to try.
[[noreturn]] void refuse_run(const std::string& path, const std::vector<std::string>& names) {
  // Sorted, with leading zeros: the last name is `release` if it is there, or else the newest.
  const auto newest = std::find_if(names.rbegin(), names.rend(), megatron::is_iteration);
  const std::string advice = newest == names.rend()
                                 ? " without a checkpoint: no folder iter_*"
                                 : " (give the path of one checkpoint, such as " +
                                       printable(join_path(path, *newest)) + ")";
  throw Error(ErrorKind::unsupported, {.path = path},
              "expected a checkpoint, found a folder of Megatron's checkpoints" + advice);
}

/// Returns the folder of the checkpoint: `path` itself, or the one that the file `kTracker` in
/// `path` names.
std::string folder_of(const FileSystem& fs, const std::string& path) {
  const std::vector<std::string> names = fs.list_directory(path);
  if (has_ranks(names)) return path;
  const std::string tracker = join_path(path, std::string(megatron::kTracker));
  std::string text = read_file(fs, tracker, kMaxTrackerNbytes);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  std::string name = text;
  if (text != "release") {
    constexpr std::size_t kNumDigits = 7;
    const bool is_number = !text.empty() && text.size() < 20 &&
                           text.find_first_not_of("0123456789") == std::string::npos;
    const std::size_t num_zeros = kNumDigits - std::min(kNumDigits, text.size());
    name = is_number ? "iter_" + std::string(num_zeros, '0') + text : std::string();
  }
  const std::string folder = join_path(path, name);
  if (name.empty() || fs.kind_of(folder) != FileKind::directory) refuse_run(path, names);
  if (!has_ranks(fs.list_directory(folder))) refuse_run(path, names);
  return folder;
}

}  // namespace

std::unique_ptr<CheckpointReader> open_megatron(const FileSystem& fs, std::string path,
                                                const std::vector<std::string>& as_dict) {
  std::string folder = folder_of(fs, path);
  return std::make_unique<MegatronReader>(fs, std::move(path), std::move(folder), as_dict);
}

}  // namespace tessera::formats
