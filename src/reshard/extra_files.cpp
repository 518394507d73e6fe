// Decides which extra files (`config.json`, a tokenizer) a move copies. Writers copy them
// (src/formats/staging/extra_copies.h).

#include "reshard/extra_files.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "base/outside_failure.h"
#include "base/size_text.h"
#include "formats/bin/bin_files.h"
#include "formats/extra_entries.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/safetensors/shard_names.h"
#include "formats/staging/extra_copies.h"
#include "object_store/stored_objects.h"
#include "reshard/config_dtype.h"
#include "reshard/config_quantization.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::ExtraEntry;
using formats::ExtraFile;
using formats::Finding;
using formats::MergePreference;

constexpr std::string_view kExtraFilesRule = "extra files";
constexpr std::uint64_t kMaxConfigNbytes = std::uint64_t{16} << 20;

/// The extra entries of all folders: for each name, the folders that have it, and the entry there.
using Found = std::map<std::string, std::vector<std::pair<std::string, ExtraEntry>>>;

void add(Found& found, const std::string& directory, const std::vector<ExtraEntry>& entries) {
  for (const ExtraEntry& entry : entries) found[entry.name].emplace_back(directory, entry);
}

/// Adds the extra entries of each subfolder of `source` that holds files of the checkpoint. They
/// are listed but never copied (Kind::in_own_folder). Exception: if `source` itself has no
/// checkpoint file, the extra entries of its direct subfolders are treated as if they were in
/// `source`.
void add_within(const FileSystem& fs, const std::string& source, formats::Format format,
                const std::set<std::string>& opened, Found& found) {
  const auto is_beside = [&](const std::string& path) { return directory_of(path) == source; };
  const bool is_one_folder = std::ranges::none_of(opened, is_beside);
  for (const std::string& folder : formats::list_own_folders(source, opened)) {
    const std::string path = join_path(source, folder);
    std::vector<ExtraEntry> entries = formats::list_extra_entries(fs, path, format, opened);
    const bool is_checkpoint = is_one_folder && is_beside(path);
    for (ExtraEntry& entry : entries) {
      if (is_checkpoint) break;
      entry.name = join_path(folder, entry.name);
      entry.kind = ExtraEntry::Kind::in_own_folder;
    }
    add(found, is_checkpoint ? path : source, entries);
  }
}

Found find_beside_sources(const FileSystem& fs, const CheckpointReader& reader,
                          const std::vector<std::string>& sources) {
  const std::vector<std::string> data_files = reader.data_files();
  const std::set<std::string> opened(data_files.begin(), data_files.end());
  Found found;
  for (const std::string& source : sources) {
    if (fs.kind_of(source) != FileKind::directory) continue;
    const formats::Format format = formats::detect_format(fs, source);
    add(found, source, formats::list_extra_entries(fs, source, format, opened));
    add_within(fs, without_trailing_slashes(source), format, opened, found);
  }
  return found;
}

/// Returns the extra entries of the folder that the user has given for them. Leaves out the sources
/// that are in this folder.
Found find_in_folder(const FileSystem& fs, const std::string& folder,
                     const std::vector<std::string>& sources) {
  const auto kind = fs.kind_of(folder);
  if (kind != FileKind::directory) {
    throw Error::expected(kind ? ErrorKind::invalid_argument : ErrorKind::not_found,
                          {.path = folder}, kExtraFilesRule, "a folder that contains extra files",
                          kind ? "a file" : "nothing");
  }
  std::vector<ExtraEntry> entries = formats::list_entries_beside_checkpoints(fs, folder);
  const std::string within = join_path(without_trailing_slashes(folder), "");
  std::erase_if(entries, [&](const ExtraEntry& entry) {
    return std::ranges::any_of(sources, [&](const std::string& source) {
      return join_path(without_trailing_slashes(source), "").starts_with(within + entry.name + '/');
    });
  });
  Found found;
  add(found, folder, entries);
  return found;
}

/// Returns why an entry of this kind is never copied; empty for a file, which may be copied.
std::string_view why_never(ExtraEntry::Kind kind) {
  switch (kind) {
    case ExtraEntry::Kind::file:
      return {};
    case ExtraEntry::Kind::link:
      return "a link";
    case ExtraEntry::Kind::folder:
      return "a folder";
    case ExtraEntry::Kind::other:
      return "not a regular file";
    case ExtraEntry::Kind::checkpoint_file:
      return "looks like a checkpoint file";
    case ExtraEntry::Kind::in_own_folder:
      return "in a folder of the checkpoint";
    case ExtraEntry::Kind::unnamed_file:
      return "has the name of a checkpoint file, but the checkpoint does not list it";
  }
  return {};
}

/// Returns whether a file has the name under which ModelOpt, GPTQ or AWQ describe quantized
/// weights. vLLM and others read this file if config.json does not describe a quantization.
bool describes_codes(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNames = {"hf_quant_config.json",
                                                      "quantize_config.json", "quant_config.json"};
  return std::ranges::find(kNames, name) != kNames.end();
}

/// Returns whether a file is DeepSpeed's `latest`, with the name of a folder beside it. Folders are
/// not copied, so a copy of the file would name none.
bool names_a_folder(const FileSystem& fs, const std::string& directory, std::string_view name) {
  if (name != "latest") return false;
  constexpr std::uint64_t kMaxNameNbytes = 256;
  std::string folder = read_begin(fs, join_path(directory, "latest"), kMaxNameNbytes).value_or("");
  folder.resize(folder.find_last_not_of(" \n") + 1);  // npos + 1 is 0
  return !folder.empty() && folder.find('/') == std::string::npos &&
         fs.kind_of(join_path(directory, folder)) == FileKind::directory;
}

/// Returns whether an entry is a folder with a checkpoint of DeepSpeed. The Trainer of transformers
/// saves one beside the model, whose weights are rounded, under this name.
bool is_checkpoint_of_deepspeed(const FileSystem& fs, const std::string& directory,
                                const std::string& name, const ExtraEntry& entry) {
  if (entry.kind != ExtraEntry::Kind::folder || !name.starts_with("global_step")) return false;
  const std::string path = join_path(directory, name);
  std::vector<std::string> names;
  try {
    names = fs.list_directory(path);
  } catch (const Error&) {
    return false;  // folders that cannot be listed are not copied either
  }
  const formats::FormatDriver& driver = formats::driver_of(formats::Format("deepspeed"));
  return driver.recognize_directory({path, names}).match == formats::Match::by_name;
}

/// Returns whether a file is one of the two that make a DCP checkpoint one of Megatron.
bool is_of_torch_dist(const FileSystem& fs, const std::string& directory, std::string_view name) {
  return (name == formats::megatron::kCommonFile || name == formats::megatron::kConfigFile) &&
         formats::megatron::is_torch_dist(fs, directory);
}

/// Returns the names of the files in the `weight_map` of an index of shards; none for other JSON.
std::set<std::string> files_in_index(std::string_view text, const std::string& path) {
  std::set<std::string> names;
  try {
    const Value index = parse_json(text, path);
    const Value* const map = index.find("weight_map");
    const auto* const files = map ? map->get_if<Value::Dict>() : nullptr;
    if (files == nullptr) return names;
    for (const auto& [tensor, file] : *files) {
      if (const auto* const name = file.get_if<std::string>()) names.insert(*name);
    }
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;  // other errors: no strict JSON
  }
  return names;
}

/// Decides for each extra file whether it is copied, left out or refused.
class Sorter {
 public:
  /// `changes_tensors`: as in ExtraFilesOptions, also true for a cast or a part of the tensors.
  /// `changes_rows`: whether a recipe gave rows another order than Megatron's arguments say.
  /// `loses_common_state`: whether a recipe left out the object that replaces `common.pt`, or there
  /// was none.
  Sorter(const FileSystem& fs, formats::Format format, const std::string& destination,
         const ExtraFilesOptions& options, bool changes_tensors, bool changes_rows,
         bool loses_common_state)
      : fs_(fs),
        driver_(formats::driver_of(format)),
        is_directory_(driver_.destination_kind(destination) == DestinationKind::directory),
        options_(options),
        changes_tensors_(changes_tensors),
        changes_rows_(changes_rows),
        loses_common_state_(loses_common_state) {}

  void sort(const Found& found) {
    for (const auto& [name, places] : found) sort(name, places);
    keep_to_limit();
    leave_indexes_without_shards();
  }
  void leave_all(const Found& found, const std::string& why) {
    for (const auto& [name, places] : found) leave(name, why);
  }

  ExtraFilesPlan take() {
    note_preferred();
    std::ranges::sort(result_.carried, {}, &ExtraFile::name);
    std::ranges::sort(result_.left, {}, &ExtraFilesPlan::Left::name);
    return std::move(result_);
  }

 private:
  using Places = Found::mapped_type;

  void leave(const std::string& name, std::string_view why) {
    result_.left.push_back({name, std::string(why)});
  }

  void sort(const std::string& name, const Places& places) {
    const auto& [directory, entry] =
        options_.preference == MergePreference::last ? places.back() : places.front();
    if (options_.policy == ExtraFilesPolicy::leave) return leave(name, "as asked");
    if (!is_directory_) return leave(name, "the destination is a single file");
    const std::string_view why = why_never(entry.kind);
    const bool is_file =
        entry.kind == ExtraEntry::Kind::file || entry.kind == ExtraEntry::Kind::checkpoint_file;
    if (is_file && driver_.writes_file(name)) return refuse_name(join_path(directory, name));
    if (is_checkpoint_of_deepspeed(fs_, directory, name, entry)) {
      return leave(name,
                   "a DeepSpeed checkpoint, with the float32 weights and the state of the "
                   "optimizer; to move it, give its path as the source");
    }
    if (!why.empty()) return leave(name, why);
    if (name == driver_.traits().misleading_name) {
      return leave(name, why_never(ExtraEntry::Kind::checkpoint_file));
    }
    if (name == object_store::kIncompleteMark) {
      return leave(name, "marks an incomplete checkpoint");
    }
    if (names_a_folder(fs_, directory, name)) {
      return leave(name, "names a folder, which is not copied");
    }
    // Without a recipe, they are kept: a move back to DCP then gives a checkpoint of Megatron.
    if (options_.is_converted && formats::holds_whole_tensors(driver_.format()) &&
        is_of_torch_dist(fs_, directory, name)) {
      return leave(name, "describes Megatron's tensors, which a recipe changed");
    }
    // A later recipe would put the rows in order once more, and Megatron would read them so.
    if (changes_rows_ && is_of_torch_dist(fs_, directory, name)) {
      return leave(name, "says that rows of experts take turns, which a recipe changed");
    }
    if (loses_common_state_ && name == formats::megatron::kConfigFile &&
        is_of_torch_dist(fs_, directory, name) &&
        !fs_.kind_of(join_path(directory, formats::megatron::kCommonFile))) {
      return leave(name, "describes Megatron's common state, which a recipe left out");
    }
    if (!options_.folder.empty() && formats::holds_tensors(name)) {
      return leave(name, "holds the tensors of the model in that folder");
    }
    if (changes_tensors_ && formats::holds_tensors(name)) {
      return leave(name, "belongs to the tensors before the change");
    }
    if (options_.removes_quantization && describes_codes(name)) {
      return leave(name, "describes quantized weights, which became numbers");
    }
    if (!are_equal(name, places)) {
      if (options_.preference == MergePreference::none) {
        return leave(name, "differs between the sources");
      }
      preferred_.push_back(name);
    }
    const std::string path = join_path(directory, name);
    result_.carried.push_back({path, name, entry.nbytes, formats::file_state(path)});
  }

  bool are_equal(const std::string& name, const Places& places) const {
    const std::string first = join_path(places.front().first, name);
    return std::ranges::all_of(places, [&](const auto& place) {
      const std::string path = join_path(place.first, name);
      return path == first || formats::have_equal_bytes(fs_, first, path);
    });
  }

  /// Adds a note about names for which the sources have different files. The user's preference
  /// chose the first or the last of these files.
  void note_preferred() {
    if (preferred_.empty()) return;
    const bool is_last = options_.preference == MergePreference::last;
    const std::string others =
        preferred_.size() == 1 ? "" : " and " + std::to_string(preferred_.size() - 1) + " more";
    result_.notes.push_back(
        {.severity = Finding::Severity::note,
         .rule = std::string(kExtraFilesRule),
         .where = {},
         .expected = "equal files under one name in all sources",
         .found = "different files (the file of the " + std::string(is_last ? "last" : "first") +
                  " source is copied): '" + printable(preferred_.front()) + "'" + others});
  }

  void refuse_name(const std::string& path) {
    result_.problems.push_back({.rule = std::string(kExtraFilesRule),
                                .where = {.path = path},
                                .expected = "a name that no file of the new checkpoint has",
                                .found = "'" + printable(last_component(path)) + "'",
                                .remedy = {Remedy::Action::leave_extra_files}});
  }

  /// Leaves out the largest files if all files together are larger than
  /// ExtraFilesOptions::max_nbytes. Its default, kDefaultExtraFilesNbytes, is in
  /// tessera/reshard/executor.h.
  void keep_to_limit() {
    auto& carried = result_.carried;
    std::ranges::sort(carried, [](const ExtraFile& a, const ExtraFile& b) {
      return std::pair(a.nbytes, a.name) < std::pair(b.nbytes, b.name);
    });
    std::uint64_t left_nbytes = options_.max_nbytes;
    const auto too_large = std::ranges::find_if(carried, [&](const ExtraFile& file) {
      if (file.nbytes > left_nbytes) return true;
      left_nbytes -= file.nbytes;
      return false;
    });
    for (auto file = too_large; file != carried.end(); ++file) {
      leave(file->name, iec_size(file->nbytes) + ", over the limit of " +
                            iec_size(options_.max_nbytes) + " for all");
    }
    carried.erase(too_large, carried.end());
  }

  /// Leaves out each index of shards, such as that of a variant
  /// (`diffusion_pytorch_model.safetensors.index.fp16.json`), if not all its shards are copied.
  void leave_indexes_without_shards() {
    std::set<std::string> carried;
    for (const ExtraFile& file : result_.carried) carried.insert(file.name);
    std::erase_if(result_.carried, [&](const ExtraFile& file) {
      const bool may_be_index = file.name.ends_with(".json") &&
                                file.name.find(".index.") != std::string::npos &&
                                file.nbytes <= kMaxConfigNbytes;
      if (!may_be_index) return false;
      const std::set<std::string> shards =
          files_in_index(read_file(fs_, file.path, kMaxConfigNbytes), file.path);
      if (std::ranges::includes(carried, shards)) return false;
      leave(file.name, "lists shards that are not copied");
      return true;
    });
  }

  const FileSystem& fs_;
  const formats::FormatDriver& driver_;
  const bool is_directory_;
  const ExtraFilesOptions& options_;
  const bool changes_tensors_;
  const bool changes_rows_;
  const bool loses_common_state_;
  // Names of files that differ between the sources, and of which the preference chose one.
  std::vector<std::string> preferred_;
  ExtraFilesPlan result_;
};

/// Returns the old dtypes and the new dtype of the tensors that the plan casts; nothing if it casts
/// none. `widened`: as in ExtraFilesOptions.
std::optional<CastDTypes> dtypes_of_cast(const Plan& plan, const CheckpointReader& reader,
                                         const std::optional<CastDTypes>& widened) {
  std::optional<CastDTypes> cast = widened;
  if (cast) cast->from.erase(cast->to);
  for (std::size_t i = 0; i < plan.copies.size(); ++i) {
    const DType to = plan.destination.tensors[i].meta.dtype;
    const DType from = reader.contents().tensors[plan.copies[i].source_tensor].meta.dtype;
    if (from == to || (widened && from == DType::float64)) continue;
    if (!cast) cast = CastDTypes{{}, to};
    cast->from.insert(from);
  }
  if (cast && cast->from.empty()) cast.reset();
  return cast;
}

/// Puts the new dtype into the copy of `config.json`, or notes why not.
void edit_config(const FileSystem& fs, const CastDTypes& cast, ExtraFilesPlan& files) {
  const auto config = std::ranges::find(files.carried, "config.json", &ExtraFile::name);
  if (config == files.carried.end()) return;
  ConfigEdit edit;
  if (config->nbytes > kMaxConfigNbytes) {
    edit.why_not = exact_size(config->nbytes);
  } else {
    const std::string text =
        config->text ? *config->text : read_file(fs, config->path, kMaxConfigNbytes);
    edit = edit_config_dtype(text, cast);
  }
  if (!edit.why_not.empty()) {
    files.notes.push_back({.severity = Finding::Severity::note,
                           .rule = std::string(kExtraFilesRule),
                           .where = {.path = config->path},
                           .expected = "JSON of at most " + iec_size(kMaxConfigNbytes) +
                                       ", so that the new dtype can be written into it",
                           .found = edit.why_not + "; it is copied unchanged"});
  }
  if (!edit.left.empty()) {
    files.notes.push_back({.severity = Finding::Severity::note,
                           .rule = std::string(kExtraFilesRule),
                           .where = {.path = config->path},
                           .expected = "the old dtype of a cast tensor",
                           .found = edit.left + " (left unchanged)"});
  }
  if (edit.what.empty()) return;
  config->text = std::move(edit.text);
  config->nbytes = config->text->size();
  files.edits.push_back({config->name, std::move(edit.what)});
}

/// Returns the floating-point dtype of most bytes of the weights that the plan writes; nothing if
/// there are none.
std::optional<DType> dtype_of_most_weights(const Plan& plan) {
  std::map<DType, std::uint64_t> nbytes;
  for (const formats::TensorEntry& tensor : plan.destination.tensors) {
    if (tensor.kind != formats::StateKind::plain || !is_floating_point(tensor.meta.dtype)) continue;
    nbytes[tensor.meta.dtype] += tensor.meta.nbytes();
  }
  const auto most =
      std::ranges::max_element(nbytes, {}, [](const auto& each) { return each.second; });
  return most == nbytes.end() ? std::nullopt : std::optional(most->first);
}

/// Notes that the copy of `config.json` names another dtype than that of the weights beside it.
void compare_config(const FileSystem& fs, const Plan& plan, ExtraFilesPlan& files) {
  const auto config = std::ranges::find(files.carried, "config.json", &ExtraFile::name);
  if (config == files.carried.end() || config->nbytes > kMaxConfigNbytes) return;
  const auto weights = dtype_of_most_weights(plan);
  if (!weights) return;
  const auto named = named_model_dtype(
      config->text ? *config->text : read_file(fs, config->path, kMaxConfigNbytes));
  if (!named || *named == *weights) return;
  files.notes.push_back({.severity = Finding::Severity::note,
                         .rule = std::string(kExtraFilesRule),
                         .where = {.path = config->path},
                         .expected = std::string(dtype_name(*weights)) +
                                     ", the dtype of most weights that are written",
                         .found = std::string(dtype_name(*named)) +
                                  ", to which loaders round them (copied unchanged)"});
}

/// Returns whether a folder gets files of whole tensors, which loaders find by names such as
/// `model`. Loaders of the files of ranks, such as DeepSpeed, find them by the ranks.
bool has_files_of_models(const std::string& destination, formats::Format format) {
  const formats::FormatDriver& driver = formats::driver_of(format);
  return formats::holds_whole_tensors(format) && !driver.traits().has_ranks_when_read &&
         driver.destination_kind(destination) == DestinationKind::directory;
}

bool has_config_of_adapter(const ExtraFilesPlan& files) {
  return std::ranges::find(files.carried, "adapter_config.json", &ExtraFile::name) !=
         files.carried.end();
}

/// Returns whether a part of the name is one that only the tensors of PEFT's adapters have.
bool is_tensor_of_adapter(std::string_view fqn) {
  constexpr std::array<std::string_view, 10> kBegins = {
      "lora_", "ia3_",  "vera_",     "hada_",     "lokr_",
      "oft_",  "boft_", "randlora_", "adaption_", "prompt_e"};
  return std::ranges::any_of(kBegins, [&](std::string_view begin) {
    return fqn.starts_with(begin) || fqn.find('.' + std::string(begin)) != std::string_view::npos;
  });
}

bool is_file_of_adapter(const std::string& path) {
  return last_component(path).starts_with("adapter");
}

bool is_of_peft(const formats::TensorEntry& tensor) {
  return tensor.meta.fqn.starts_with("base_model.");
}

bool is_state(const formats::TensorEntry& tensor) {
  return tensor.kind != formats::StateKind::plain;
}

bool has_name_of_adapter(const formats::TensorEntry& tensor) {
  return is_of_peft(tensor) || is_tensor_of_adapter(tensor.meta.fqn);
}

/// Returns the first weight whose name is not like those in adapters.
auto find_tensor_of_model(const Plan& plan) {
  return std::ranges::find_if_not(plan.destination.tensors, [](const auto& tensor) {
    return is_state(tensor) || has_name_of_adapter(tensor);
  });
}

/// Returns whether the tensors are those of an adapter, as the names of the source's files or of
/// the tensors tell.
bool is_adapter_of_peft(const CheckpointReader& reader, const Plan& plan,
                        const ExtraFilesPlan& files) {
  const std::vector<std::string> old = reader.data_files();
  // Only checkpoints of whole tensors have files named as a model's or an adapter's.
  const bool has_names = formats::holds_whole_tensors(reader.format()) && !old.empty();
  if (has_names && std::ranges::all_of(old, is_file_of_adapter)) return true;
  const auto& tensors = plan.destination.tensors;
  if (has_config_of_adapter(files)) return find_tensor_of_model(plan) == tensors.end();
  return std::ranges::all_of(tensors,
                             [](const auto& each) { return is_state(each) || is_of_peft(each); }) &&
         std::ranges::any_of(tensors, [](const formats::TensorEntry& each) {
           return is_tensor_of_adapter(each.meta.fqn);
         });
}

/// Returns the folder of a checkpoint of several files, with a slash at the end: the source, or the
/// place of the index that is the source. Nothing for a single file.
std::optional<std::string> folder_of_source(const FileSystem& fs, const std::string& source) {
  if (fs.kind_of(source) == FileKind::directory) return join_path(source, "");
  if (!source.ends_with(formats::detail::kIndexSuffix)) return std::nullopt;
  return source.substr(0, source.rfind('/') + 1);  // npos + 1 is 0
}

void note_names(const std::string& destination, std::string expected, std::string found,
                ExtraFilesPlan& files) {
  files.notes.push_back({.severity = Finding::Severity::note,
                         .rule = std::string(kExtraFilesRule),
                         .where = {.path = destination},
                         .expected = std::move(expected),
                         .found = std::move(found)});
}

/// Notes that the files of an adapter get weights of the base model, as the state of a whole model
/// of PEFT has them. PEFT's adapters have only those of embeddings.
void note_weights_of_base(const Plan& plan, const std::string& destination, formats::Format format,
                          ExtraFilesPlan& files) {
  if (!has_files_of_models(destination, format)) return;
  constexpr std::string_view kWeight = ".base_layer.weight";
  const auto& tensors = plan.destination.tensors;
  const auto is_weight_of_base = [&](const formats::TensorEntry& tensor) {
    const std::string& name = tensor.meta.fqn;
    if (!name.ends_with(kWeight)) return false;
    const std::string matrix = name.substr(0, name.size() - kWeight.size()) + ".lora_embedding_";
    return std::ranges::none_of(tensors, [&](const formats::TensorEntry& other) {
      return other.meta.fqn.starts_with(matrix);
    });
  };
  const auto found = std::ranges::find_if(tensors, is_weight_of_base);
  if (found == tensors.end()) return;
  note_names(destination, "only tensors of an adapter in files called adapter_model",
             "weights of the base model too, such as " + printable(found->meta.fqn) +
                 ": PEFT does not load a whole model as an adapter",
             files);
}

/// Returns the data files that lie in the sources' folders themselves.
std::vector<std::string> files_in_sources(const FileSystem& fs, const CheckpointReader& reader,
                                          const std::vector<std::string>& sources) {
  std::set<std::string> folders;
  for (const std::string& source : sources) {
    if (auto folder = folder_of_source(fs, source)) folders.insert(*std::move(folder));
  }
  std::vector<std::string> files = reader.data_files();
  std::erase_if(files, [&](const std::string& path) {
    return !folders.contains(path.substr(0, path.rfind('/') + 1));
  });
  return files;
}

/// Returns whether the copied `config.json` is that of a model of diffusers.
bool has_config_of_diffusers(const FileSystem& fs, const ExtraFilesPlan& files) {
  const auto config = std::ranges::find(files.carried, "config.json", &ExtraFile::name);
  if (config == files.carried.end() || config->nbytes > kMaxConfigNbytes) return false;
  try {
    const Value parsed = parse_json(read_file(fs, config->path, kMaxConfigNbytes), config->path);
    return parsed.find("_class_name") != nullptr && parsed.find("_diffusers_version") != nullptr;
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return false;  // no strict JSON
  }
}

/// Names the files: by the names of the source's, if the source and the new checkpoint are folders
/// of one format, otherwise as the loaders of such a model look for them. Notes names that loaders
/// may not find. Files of a recipe are of another framework, which looks for the usual names.
void name_files(const FileSystem& fs, const CheckpointReader& reader,
                const std::vector<std::string>& sources, const std::string& destination,
                formats::Format format, const ExtraFilesOptions& options, bool is_adapter,
                ExtraFilesPlan& files) {
  const std::string usual(is_adapter                           ? "adapter_model"
                          : has_config_of_diffusers(fs, files) ? formats::bin::kDiffusersStem
                                                               : "model");
  files.stem = usual;
  const std::vector<std::string> old = reader.data_files();
  if (format != reader.format() || !has_files_of_models(destination, format) || old.empty() ||
      !folder_of_source(fs, sources.front())) {
    return;
  }
  const std::string suffix(formats::detail::kShardNaming.file_suffix);
  std::string own = formats::detail::common_stem(fs, files_in_sources(fs, reader, sources));
  if (own == usual) return;
  if (!own.empty() && !options.is_converted) {
    files.stem = std::move(own);
    if (usual == "model") return;
    return note_names(
        destination,
        usual + suffix + ", which " + (is_adapter ? "PEFT" : "diffusers") + " looks for",
        files.stem + suffix + ", as in the source (rename the files)", files);
  }
  const auto has_usual_name = [&](const std::string& path) {
    return last_component(path).starts_with(usual + suffix) ||
           last_component(path).starts_with(usual + "-");
  };
  // Files of several sources may become one model, as those of an adapter and its base.
  if (own.empty() && sources.size() > 1 && std::ranges::any_of(old, has_usual_name)) return;
  const auto other = own.empty() ? std::ranges::find_if_not(old, has_usual_name) : old.begin();
  if (other == old.end()) return;
  note_names(destination,
             "files with the names of the source's, such as " + printable(last_component(*other)) +
                 ", if a loader looks for them",
             "other names (rename the files, or write a single file)", files);
}

/// Notes that `adapter_config.json` gets beside a model that was not beside it, or is not beside an
/// adapter.
void note_config_of_adapter(const CheckpointReader& reader, const Plan& plan,
                            const std::string& destination, formats::Format format,
                            const ExtraFilesOptions& options, bool is_adapter,
                            ExtraFilesPlan& files) {
  if (!has_files_of_models(destination, format)) return;
  const std::vector<std::string> old = reader.data_files();
  const bool was_beside_model =
      formats::holds_whole_tensors(reader.format()) && !old.empty() &&
      std::ranges::none_of(old, is_file_of_adapter) &&
      std::ranges::none_of(plan.destination.tensors, has_name_of_adapter) && options.folder.empty();
  if (is_adapter == has_config_of_adapter(files) || (!is_adapter && was_beside_model)) return;
  if (is_adapter) {
    return note_names(destination, "adapter_config.json beside an adapter, which PEFT looks for",
                      "none (copy it, too)", files);
  }
  note_names(destination, "only tensors of an adapter beside adapter_config.json",
             "others, such as " + printable(find_tensor_of_model(plan)->meta.fqn) +
                 ": the files are called " + files.stem +
                 ", but loaders may take the folder for an adapter (remove adapter_config.json if "
                 "it is none)",
             files);
}

/// Leaves out the configuration of an adapter that is merged with the model, or whose file lies
/// beside the model and is not copied. Loaders would take the copy of the model for an adapter.
void leave_config_of_adapter(const CheckpointReader& reader, const Plan& plan,
                             const std::string& destination, formats::Format format,
                             const ExtraFilesOptions& options, ExtraFilesPlan& files) {
  const auto config = std::ranges::find(files.carried, "adapter_config.json", &ExtraFile::name);
  if (config == files.carried.end()) return;
  const auto has_files_of_adapter = [&] {
    return formats::holds_whole_tensors(reader.format()) &&
           std::ranges::any_of(reader.data_files(), is_file_of_adapter);
  };
  const bool is_merged =
      options.merges_adapters ||
      (has_files_of_models(destination, format) &&
       (has_files_of_adapter() || std::ranges::any_of(plan.destination.tensors, is_of_peft)));
  const bool is_left = std::ranges::any_of(files.left, [](const ExtraFilesPlan::Left& file) {
    return file.name.starts_with("adapter_model");
  });
  if (!is_merged && !is_left) return;
  files.left.push_back({config->name, is_merged ? "describes an adapter, and this is a model"
                                                : "describes an adapter, which is not copied"});
  std::ranges::sort(files.left, {}, &ExtraFilesPlan::Left::name);
  files.carried.erase(config);
}

/// Removes `members` from the copy of the file `name` (config.json), or notes why not.
void unquantize_config(const FileSystem& fs, std::string_view name,
                       std::span<const std::string_view> members, ExtraFilesPlan& files) {
  const auto config = std::ranges::find(files.carried, name, &ExtraFile::name);
  if (config == files.carried.end()) return;
  std::optional<UnquantizedConfig> without;
  if (config->nbytes <= kMaxConfigNbytes) {
    without = remove_quantization(read_file(fs, config->path, kMaxConfigNbytes), members);
  }
  if (!without) {
    files.notes.push_back({.severity = Finding::Severity::note,
                           .rule = std::string(kExtraFilesRule),
                           .where = {.path = config->path},
                           .expected = "a JSON object of at most " + iec_size(kMaxConfigNbytes) +
                                       ", so that " + std::string(members.front()) +
                                       " can be removed from it",
                           .found = "a larger file or other text; it is copied unchanged"});
    return;
  }
  if (without->removed.empty()) return;
  config->text = std::move(without->text);
  config->nbytes = config->text->size();
  for (const std::string& member : without->removed) {
    files.edits.push_back({config->name, member + ": removed"});
  }
}

}  // namespace

formats::Finding refusal_of_extra_files(const std::string& folder,
                                        const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNamed = 20;
  std::string list;
  for (const std::string& name : std::span(names).first(std::min(names.size(), kMaxNamed))) {
    list += (list.empty() ? "" : ", ") + printable(name);
  }
  if (names.size() > kMaxNamed) list += ", …";
  return {.rule = std::string(kExtraFilesRule),
          .where = {.path = folder},
          .expected = "none beside the checkpoint",
          .found = std::to_string(names.size()) + ": " + list,
          .remedy = {Remedy::Action::leave_extra_files}};
}

std::optional<ExtraFilesPolicy> parse_extra_files_policy(std::string_view name) {
  if (name == "carry") return ExtraFilesPolicy::carry;
  if (name == "leave") return ExtraFilesPolicy::leave;
  if (name == "refuse") return ExtraFilesPolicy::refuse;
  return std::nullopt;
}

ExtraFilesPlan plan_extra_files(const FileSystem& fs, const Plan& plan,
                                const CheckpointReader& reader,
                                const std::vector<std::string>& sources,
                                const std::string& destination, formats::Format format,
                                const ExtraFilesOptions& options) {
  const Found beside = find_beside_sources(fs, reader, sources);
  if (options.policy == ExtraFilesPolicy::refuse && !beside.empty()) {
    std::vector<std::string> names;
    for (const auto& [name, places] : beside) names.push_back(name);
    return {.problems = {refusal_of_extra_files(reader.path(), names)}};
  }
  const auto cast = dtypes_of_cast(plan, reader, options.widened);
  const auto& notes = reader.contents().opening_findings;
  const bool changes_rows =
      std::ranges::find(notes, formats::megatron::kRowsRule, &Finding::rule) != notes.end();
  Sorter sorter(fs, format, destination, options,
                options.changes_tensors || options.removes_quantization || options.is_converted ||
                    cast.has_value() || plan.left_out.tensors > 0,
                changes_rows,
                options.is_converted && !formats::megatron::has_common_object(plan.destination));
  if (options.folder.empty()) {
    sorter.sort(beside);
  } else {
    const Found given = find_in_folder(fs, options.folder, sources);
    sorter.sort(given);
    Found others = beside;
    std::erase_if(others, [&](const auto& entry) {
      const std::string path = join_path(entry.second.front().first, entry.first);
      return formats::have_equal_bytes(fs, path, join_path(options.folder, entry.first));
    });
    sorter.leave_all(others, "another folder is given");
  }
  ExtraFilesPlan files = sorter.take();
  const bool is_adapter = is_adapter_of_peft(reader, plan, files);
  if (is_adapter) note_weights_of_base(plan, destination, format, files);
  if (!is_adapter || options.merges_adapters) {
    leave_config_of_adapter(reader, plan, destination, format, options, files);
  }
  if (options.removes_quantization) {
    unquantize_config(fs, "config.json", kQuantizationInConfig, files);
    unquantize_config(fs, "params.json", kQuantizationInParams, files);
  }
  if (cast) {
    edit_config(fs, *cast, files);
  } else if (formats::holds_whole_tensors(format)) {
    compare_config(fs, plan, files);
  }
  name_files(fs, reader, sources, destination, format, options, is_adapter, files);
  note_config_of_adapter(reader, plan, destination, format, options, is_adapter, files);
  return files;
}

}  // namespace tessera::reshard
