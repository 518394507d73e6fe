#include <algorithm>
#include <set>
#include <utility>

#include "formats/drivers.h"
#include "formats/open_files.h"
#include "formats/rank_files/joined_ranks.h"
#include "formats/torch_checkpointing.h"
#include "formats/torch_checkpointing/files.h"
#include "formats/torch_checkpointing/metadata.h"
#include "formats/torch_checkpointing/placed_file.h"
#include "formats/torch_zip/torch_zip_reader.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using rank_files::RankFile;
using torch_checkpointing::Group;
using torch_checkpointing::Item;
using torch_checkpointing::kMetadataName;
using torch_checkpointing::Metadata;
using torch_checkpointing::PlacedFile;
using torch_checkpointing::Sharding;
using torch_checkpointing::Source;
using torch_zip::ShardPlace;
using torch_zip::SharedPlace;
using torch_zip::TorchFileReader;

constexpr std::string_view kOtherSave = "files of different saves?";

/// Opens the files of all ranks, and checks that they agree with the metadata.
class Opener {
 public:
  Opener(const FileSystem& fs, const std::string& path, const std::vector<std::string>& as_dict)
      : fs_(fs), path_(path), as_dict_(as_dict) {
    const std::vector<std::string> names = fs.list_directory(path);
    if (std::ranges::find(names, kMetadataName) != names.end()) {
      metadata_ = torch_checkpointing::read_metadata(fs, metadata_path());
    }
    sources_ =
        torch_checkpointing::find_sources(fs, path, names, metadata_ ? &*metadata_ : nullptr);
  }

  std::unique_ptr<CheckpointReader> open() {
    std::vector<RankFile> files;
    for (const Source& source : sources_.files) files.push_back(open_file(source));
    if (metadata_) {
      require_listed_tensors();
    } else {
      require_sharded(files);
    }
    return rank_files::join_ranks(torch_checkpointing_driver().format(), path_, sources_.world_size,
                                  std::move(files), std::move(sources_.notes));
  }

 private:
  std::string metadata_path() const { return join_path(path_, std::string(kMetadataName)); }

  RankFile open_file(const Source& source) {
    const Item* item = nullptr;
    if (metadata_) {
      const auto found = metadata_->items.find(source.item);
      if (found != metadata_->items.end()) item = &found->second;
    }
    if (source.name.find('/') != std::string::npos) require_contained(fs_, path_, source.name);
    RankFile file{source.name, source.item, source.rank, nullptr, false};
    const std::string path = join_path(path_, source.name);
    if (source.form == "TorchSerialization") {
      file.reader =
          torch_zip::read_torch_zip(open_kept(fs_, path), as_dict_, torch_zip::Pieces::left_out);
      if (is_empty(file.reader->contents())) {
        file.reader = PlacedFile::of_empty_dict(std::move(file.reader));
      }
      file.is_sole = file.reader->has_sole_object();
      if (item != nullptr) file.reader = checked(std::move(file.reader), *item, file);
    } else if (source.form == "SafetensorsSerialization" && item != nullptr) {
      file.reader = placed(safetensors_driver().open(fs_, path), *item, source.rank);
    } else {
      throw Error::expected(ErrorKind::unsupported, {.path = path}, "serialization_format",
                            "TorchSerialization or SafetensorsSerialization",
                            "'" + printable(source.form, 60) + "'");
    }
    return file;
  }

  static bool is_empty(const CheckpointContents& contents) {
    return contents.tensors.empty() && contents.values.empty() && contents.aliases.empty();
  }

  /// Returns how the metadata describes a tensor of a rank's file; null if it does not, or in a way
  /// that Tessera does not know. Marks the tensor as seen. Throws if the dtype is another one.
  const Sharding* sharding_of(const Item& item, const std::string& name, int rank,
                              const TensorMeta& meta, const std::string& path) {
    if (item.tensors.contains(name)) seen_.insert(&item.tensors.find(name)->second);
    const Group* const group = item.find(name, rank);
    if (group == nullptr) return nullptr;
    const Sharding& sharding = group->sharding;
    if (sharding.kind == Sharding::Kind::unknown) {
      note_type(sharding.type);
      return nullptr;
    }
    const std::string dtype = "torch." + std::string(dtype_name(meta.dtype));
    if (dtype != sharding.dtype) {
      refuse(path, name, "dtype", sharding.dtype, dtype);
    }
    return &sharding;
  }

  void note_type(const std::string& type) {
    if (!unknown_types_.insert(type).second) return;
    sources_.notes.push_back({.severity = Finding::Severity::note,
                              .rule = "structure",
                              .where = {.path = metadata_path()},
                              .expected = "a type of metadata that Tessera knows",
                              .found = "'" + printable(type, 60) +
                                       "' (each rank's tensor is read as it is in its file)"});
  }

  [[noreturn]] static void refuse(const std::string& path, const std::string& name,
                                  std::string_view rule, const std::string& listed,
                                  const std::string& found) {
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = name}, rule,
                          listed + ", as " + std::string(kMetadataName) + " says", found,
                          kOtherSave);
  }

  static void require_shape(const Sharding& sharding, const TensorMeta& meta,
                            const std::string& path) {
    if (sharding.whole_shape == meta.shape) return;
    refuse(path, meta.fqn, "shape of the whole", shape_to_string(sharding.whole_shape),
           shape_to_string(meta.shape));
  }

  /// Throws if a file of torch.save contradicts the metadata. Adds the places of parts that the
  /// file does not have itself (it has the places of DTensors).
  std::unique_ptr<TorchFileReader> checked(std::unique_ptr<TorchFileReader> reader,
                                           const Item& item, const RankFile& file) {
    const std::vector<TensorEntry>& tensors = reader->contents().tensors;
    std::vector<SharedPlace> places;
    bool has_more = false;  // the metadata has places that the file lacks
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const TensorMeta& meta = tensors[i].meta;
      places.push_back(reader->place_of(i));
      const std::string name = file.is_sole ? std::string() : meta.fqn;
      const Sharding* const sharding = sharding_of(item, name, file.rank, meta, reader->path());
      if (sharding == nullptr) continue;
      if (sharding->kind == Sharding::Kind::offsets && !places[i]) {
        places[i] = places_.share(sharding->place_of(file.rank));
        has_more = true;
      } else if (places[i]) {
        require_place(*sharding, *places[i], file.rank, meta, reader->path());
      } else {
        require_shape(*sharding, meta, reader->path());
      }
    }
    for (const Alias& alias : reader->contents().aliases) see(item, alias.fqn);
    if (!has_more) return reader;
    return std::make_unique<PlacedFile>(std::move(reader), std::move(places));
  }

  static void require_place(const Sharding& sharding, const ShardPlace& own, int rank,
                            const TensorMeta& meta, const std::string& path) {
    const ShardPlace listed = sharding.place_of(rank);
    if (listed.whole_shape != own.whole_shape) {
      refuse(path, meta.fqn, "shape of the whole", shape_to_string(listed.whole_shape),
             shape_to_string(own.whole_shape));
    }
    if (!own.problem.empty() || !listed.problem.empty() || listed.region == own.region) return;
    refuse(path, meta.fqn, "part of rank " + std::to_string(rank), region_to_string(listed.region),
           region_to_string(own.region));
  }

  /// Adds the places in the metadata to a file whose format has no DTensors (safetensors).
  std::unique_ptr<TorchFileReader> placed(std::unique_ptr<CheckpointReader> reader,
                                          const Item& item, int rank) {
    const std::vector<TensorEntry>& tensors = reader->contents().tensors;
    std::vector<SharedPlace> places(tensors.size());
    std::vector<KeyPath> key_paths;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const TensorMeta& meta = tensors[i].meta;
      const auto listed = item.tensors.find(meta.fqn);
      key_paths.push_back(listed == item.tensors.end() ? KeyPath{} : listed->second.path);
      const Sharding* const sharding = sharding_of(item, meta.fqn, rank, meta, reader->path());
      if (sharding == nullptr) continue;
      if (sharding->is_replicated()) {
        require_shape(*sharding, meta, reader->path());
      } else {
        places[i] = places_.share(sharding->place_of(rank));
      }
    }
    for (const Alias& alias : reader->contents().aliases) see(item, alias.fqn);
    return std::make_unique<PlacedFile>(std::move(reader), std::move(places), std::move(key_paths));
  }

  void see(const Item& item, const std::string& name) {
    const auto found = item.tensors.find(name);
    if (found != item.tensors.end()) seen_.insert(&found->second);
  }

  /// Throws if the metadata lists a tensor that no file has.
  void require_listed_tensors() const {
    for (const auto& [item_name, item] : metadata_->items) {
      for (const auto& [name, tensor] : item.tensors) {
        if (seen_.contains(&tensor) || tensor.groups.empty()) continue;
        throw Error::expected(
            ErrorKind::corruption,
            {.path = metadata_path(), .fqn = name.empty() ? item_name : item_name + "." + name},
            "tensor", "this tensor in a file of '" + printable(item_name) + "'",
            "no file that has it", kOtherSave);
      }
    }
  }

  /// Throws if no file has a DTensor. Without metadata, only DTensors show that the numbers in the
  /// file names are ranks.
  void require_sharded(const std::vector<RankFile>& files) const {
    for (const RankFile& file : files) {
      for (std::size_t i = 0; i < file.reader->contents().tensors.size(); ++i) {
        if (file.reader->place_of(i)) return;
      }
    }
    throw Error::expected(ErrorKind::unsupported, {.path = path_}, "files of ranks",
                          std::string(kMetadataName) + ", or DTensors in the files",
                          "neither: the numbers in the names may be steps",
                          "give the path of one file");
  }

  const FileSystem& fs_;
  const std::string& path_;
  const std::vector<std::string>& as_dict_;
  std::optional<Metadata> metadata_;
  torch_checkpointing::Sources sources_;
  torch_zip::PlacePool places_;
  std::set<const Item::Tensor*> seen_;  // tensors that some file has
  std::set<std::string> unknown_types_;
};

}  // namespace

std::unique_ptr<CheckpointReader> open_torch_checkpointing(
    const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict) {
  return Opener(fs, path, as_dict).open();
}

}  // namespace tessera::formats
