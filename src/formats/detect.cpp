#include "tessera/formats/detect.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "formats/signatures.h"
#include "tessera/formats/dcp.h"
#include "tessera/formats/flat_layout.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"
#include "tessera/formats/torch_zip.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kTarSignature("ustar", 5);
constexpr std::size_t kTarSignatureOffset = 257;
// PROTO 2, LONG1 of 10 bytes, and the magic number 0x1950a86a20f9469cfc6c behind it.
constexpr std::string_view kLegacyTorchSignature(
    "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 14);

Error refusal(ErrorKind kind, const std::string& path, std::string_view what) {
  return Error(kind, {.path = path}, what);
}

/// Returns the name of a checkpoint among a directory's first entries, to point at.
std::optional<std::string> checkpoint_within(const FileSystem& fs, const std::string& path,
                                             std::span<const std::string> names) {
  constexpr std::size_t kMaxLookedAt = 64;
  for (const std::string& name : names.first(std::min(names.size(), kMaxLookedAt))) {
    const std::string below = join_path(path, name);
    for (const char* mark : {"index.h5", ".metadata"}) {
      if (fs.kind_of(join_path(below, mark)) == FileKind::regular) return name;
    }
  }
  return std::nullopt;
}

Format format_of_directory(const FileSystem& fs, const std::string& path) {
  const std::vector<std::string> names = fs.list_directory(path);
  const auto has = [&](auto matches) { return std::any_of(names.begin(), names.end(), matches); };
  const auto has_name = [&](std::string_view wanted) {
    return has([&](const std::string& name) { return name == wanted; });
  };
  if (has_name("index.h5")) return Format::native;
  if (has_name(".metadata")) return Format::dcp;
  if (has([](const std::string& name) {
        return name.starts_with("rank-") && name.ends_with(".h5");
      })) {
    throw refusal(ErrorKind::corruption, path,
                  "index.h5: expected the index of a native checkpoint, found rank files alone "
                  "(`ckpt-reshard rebuild-index` writes it anew)");
  }
  if (has([](const std::string& name) {
        return name.starts_with("__") && name.ends_with(".metadata");
      })) {
    throw refusal(ErrorKind::unsupported, path,
                  ".metadata: expected one of all ranks, found one of each rank (saved with "
                  "use_collectives=False)");
  }
  if (has([](const std::string& name) { return name.ends_with(".distcp"); })) {
    throw refusal(ErrorKind::corruption, path,
                  ".metadata: expected it beside the .distcp files, found none (a save that was "
                  "interrupted?)");
  }
  if (has([](const std::string& name) {
        return name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
      })) {
    return Format::safetensors;
  }
  if (names.empty()) {
    throw refusal(ErrorKind::unsupported, path, "expected a checkpoint, found an empty directory");
  }
  if (has([](const std::string& name) {
        return name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth");
      })) {
    throw refusal(
        ErrorKind::unsupported, path,
        "expected a checkpoint, found a directory of torch.save files (name one of them)");
  }
  std::string what =
      "expected a checkpoint (index.h5, .metadata or *.safetensors), found a directory with none "
      "of them";
  if (const auto within = checkpoint_within(fs, path, names)) {
    what += " (did you mean " + printable(join_path(path, *within)) + "?)";
  }
  throw refusal(ErrorKind::unsupported, path, what);
}

Format format_of_file(const FileSystem& fs, const std::string& path) {
  if (path.ends_with(".safetensors.index.json")) return Format::safetensors;
  const std::string head = read_begin(fs, path, detail::kLookedAtNbytes).value_or("");
  if (head.empty()) {
    throw refusal(ErrorKind::corruption, path,
                  "expected a checkpoint, found an empty file (incomplete download?)");
  }
  if (head.starts_with(detail::kZipSignature) && path.ends_with(".distcp")) {
    throw refusal(
        ErrorKind::unsupported, path,
        "expected a checkpoint, found one file of a distributed one (name its directory)");
  }
  if (head.starts_with(detail::kZipSignature)) return Format::torch_zip;
  if (head.starts_with(detail::kNativeSignature)) {
    throw refusal(ErrorKind::unsupported, path,
                  "expected a checkpoint, found one file of a native one (name its directory)");
  }
  if (detail::is_hdf5(head)) {
    throw refusal(ErrorKind::unsupported, path,
                  "expected a checkpoint, found an HDF5 file that Tessera did not write");
  }
  if (head.starts_with(kLegacyTorchSignature)) {
    throw refusal(
        ErrorKind::unsupported, path,
        "expected a zip archive, found a torch.save stream from before torch 1.6 (save it "
        "again with a current torch)");
  }
  if (head.size() > kTarSignatureOffset &&
      head.substr(kTarSignatureOffset).starts_with(kTarSignature)) {
    throw refusal(
        ErrorKind::unsupported, path,
        "expected a zip archive, found a tar archive (torch.save from before torch 0.1.10?)");
  }
  const bool looks_like_safetensors = head.size() > 8 && head[8] == '{';
  if (path.ends_with(".safetensors") || looks_like_safetensors) return Format::safetensors;
  if (path.ends_with(".distcp") || path.ends_with(".metadata")) {
    throw refusal(
        ErrorKind::unsupported, path,
        "expected a checkpoint, found one file of a distributed one (name its directory)");
  }
  throw refusal(
      ErrorKind::unsupported, path,
      "expected a checkpoint (a torch.save archive, safetensors, or a directory), found a "
      "file of another kind");
}

}  // namespace

Format detect_format(const FileSystem& fs, const std::string& path) {
  const auto kind = fs.kind_of(path);
  if (!kind) throw refusal(ErrorKind::not_found, path, "expected a checkpoint, found nothing");
  if (*kind == FileKind::other) {
    throw refusal(ErrorKind::unsupported, path,
                  "expected a checkpoint, found a device, pipe or socket (`ckpt-inspect` reads a "
                  "pipe as standard input, `-`)");
  }
  return *kind == FileKind::directory ? format_of_directory(fs, path) : format_of_file(fs, path);
}

void require_no_work_in_progress(const FileSystem& fs, const std::string& path,
                                 OptionSpelling spelling) {
  if (!StagedDestination::is_work_in_progress(fs, path)) return;
  throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint", "one that is finished",
                        "what `ckpt-reshard` has not ended, with a journal beside it",
                        kept_work_hint(spelling));
}

std::unique_ptr<CheckpointReader> open_checkpoint(const FileSystem& fs, const std::string& path,
                                                  const OpenOptions& options) {
  require_no_work_in_progress(fs, path, options.spelling);
  std::unique_ptr<CheckpointReader> reader;
  switch (detect_format(fs, path)) {
    case Format::native:
      reader = open_native(fs, path);
      break;
    case Format::safetensors:
      reader = open_safetensors(fs, path);
      break;
    case Format::dcp:
      reader = open_dcp(fs, path);
      break;
    case Format::torch_zip:
      reader = open_torch_zip(fs, path);
      break;
  }
  if (options.flat_layout_path.empty()) return reader;
  return apply_flat_layout(std::move(reader), read_flat_layout(fs, options.flat_layout_path));
}

}  // namespace tessera::formats
