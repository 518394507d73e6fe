#include "formats/megatron/torch_dist_files.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "base/outside_failure.h"
#include "formats/dcp.h"
#include "formats/megatron/torch_dist_names.h"
#include "formats/torch_zip.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::formats::megatron {
namespace {

constexpr std::uint64_t kMaxConfigNbytes = std::uint64_t{1} << 20;
constexpr std::string_view kBackend = "torch_dist";
constexpr std::string_view kCommonObject = "common_state";

bool has_file(const FileSystem& fs, const std::string& directory, const char* name) {
  return fs.kind_of(join_path(directory, name)) == FileKind::regular;
}

Finding finding(std::string path, std::string expected, std::string found) {
  return {.severity = Finding::Severity::error,
          .rule = "structure",
          .where = {.path = std::move(path)},
          .expected = std::move(expected),
          .found = std::move(found)};
}

/// Returns a finding if the file at `path` is no `metadata.json` of torch_dist.
std::optional<Finding> check_config(const FileSystem& fs, const std::string& path) {
  const std::string expected = "an object with \"sharded_backend\": \"torch_dist\"";
  try {
    const Value config = parse_json(read_file(fs, path, kMaxConfigNbytes), path);
    const Value* const backend =
        config.is<Value::Dict>() ? config.find("sharded_backend") : nullptr;
    if (backend == nullptr) return finding(path, expected, "none of this name");
    const auto* const name = backend->get_if<std::string>();
    if (name != nullptr && *name == kBackend) return std::nullopt;
    return finding(path, expected, "\"sharded_backend\": " + value_to_string(*backend));
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return finding(path, expected, std::string(error.reason()));
  }
}

/// Returns whether a place such as `0_1` begins `text`. The name of an item of the object may
/// follow.
bool begins_with_place(std::string_view text) {
  const std::size_t end = text.find_first_not_of("0123456789._");
  if (text.empty() || end == 0) return false;
  return end == std::string_view::npos || text[end - 1] == '.';
}

/// Whether an entry is the object that replaces `common.pt`, or an item of it. In a checkpoint of
/// Megatron, `common_state` alone is also such an object.
bool is_common_object(std::string_view name) {
  return name == kCommonObject || before_common_object(name) == "";
}

bool has_value(const CheckpointContents& contents, bool (*matches)(std::string_view)) {
  return std::ranges::any_of(contents.values, matches, &ValueEntry::name);
}

/// Whether the `metadata.json` in a directory is there and is one of torch_dist. Throws: Error(io).
bool has_config(const FileSystem& fs, const std::string& directory) {
  return has_file(fs, directory, kConfigFile) &&
         !check_config(fs, join_path(directory, kConfigFile));
}

/// Whether Megatron wrote a DCP checkpoint: it has objects or a `metadata.json` such as Megatron
/// writes, or both files, even if damaged. Another program may have written `common.pt` alone.
bool is_of_megatron(const FileSystem& fs, const std::string& directory,
                    const CheckpointContents& contents) {
  if (has_value(contents, is_object)) return true;
  const bool has_both =
      has_file(fs, directory, kConfigFile) && has_file(fs, directory, kCommonFile);
  return has_both || has_config(fs, directory);
}

/// Does what check_torch_dist_files does. Requires: Megatron wrote the checkpoint.
void check_files(const FileSystem& fs, const std::string& directory,
                 const CheckpointContents& contents, const FindingSink& sink) {
  const std::string config_path = join_path(directory, kConfigFile);
  const std::string common_path = join_path(directory, kCommonFile);
  const bool is_there = has_file(fs, directory, kConfigFile);
  const bool has_common = has_file(fs, directory, kCommonFile);
  const bool has_object = has_common_object(contents);
  auto config_finding = is_there ? check_config(fs, config_path) : std::nullopt;
  if (has_common || has_object) {
    if (!is_there) {
      sink(finding(config_path, "the file that Megatron writes last",
                   "none (an interrupted save, or an incomplete copy?)"));
    }
    if (config_finding) sink(*std::move(config_finding));
  } else if (is_there && !config_finding) {
    sink(finding(common_path,
                 "this file of Megatron's torch_dist, or the object 'common_state' in its place",
                 "neither (an incomplete copy?)"));
  } else {
    Finding note = finding(config_path,
                           "metadata.json and common.pt, without which Megatron refuses the folder",
                           "neither of them");
    note.severity = Finding::Severity::note;
    sink(note);
  }
}

/// Whether Megatron saves objects of a class itself: its arguments, with its own classes in them.
bool is_saved_by_megatron(const std::string& class_name) {
  return class_name == "argparse.Namespace" || class_name.starts_with("megatron.");
}

/// Reads all of `common.pt`. Reports errors, and the classes and functions that it names and that
/// Megatron does not save itself. Leaves out the other notes: they are about values of Megatron's
/// classes, which every `common.pt` has.
void verify_common(const FileSystem& fs, const std::string& path, const FindingSink& sink,
                   const ProgressSink& progress, PartOfCheck& part) {
  const auto pass_on_errors = [&](const Finding& found) {
    if (found.severity == Finding::Severity::error) sink(found);
  };
  PartOfCheck whole(0, 1);
  verify_part(*open_torch_zip(fs, path), pass_on_errors, progress, 1, whole);
  for (CountedNote note : whole.notes()) {
    if (note.kind != CountedNote::Kind::foreign_names) continue;
    std::erase_if(note.names, is_saved_by_megatron);
    part.report(std::move(note), sink);
  }
}

}  // namespace

bool is_object(std::string_view name) {
  const std::size_t at = name.find(kShard);
  return at != std::string_view::npos && begins_with_place(name.substr(at + kShard.size()));
}

std::optional<std::string_view> before_common_object(std::string_view name) {
  const std::string text = std::string(kCommonObject) + std::string(kShard);
  const std::size_t at = name.find(text);
  if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) return std::nullopt;
  if (!begins_with_place(name.substr(at + text.size()))) return std::nullopt;
  return name.substr(0, at);
}

bool has_common_object(const CheckpointContents& contents) {
  return has_value(contents, is_common_object);
}

std::unique_ptr<CheckpointReader> open_common_object(const FileSystem& fs,
                                                     const std::string& path) {
  try {
    if (detect_format(fs, path) != Format("dcp")) return nullptr;
    // Each rank's file may have objects of its own: nothing else is opened.
    auto reader = open_dcp_values(fs, path, {"argparse.Namespace"}, is_common_object);
    return has_common_object(reader->contents()) ? std::move(reader) : nullptr;
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return nullptr;
  }
}

bool is_torch_dist(const FileSystem& fs, const std::string& directory) {
  try {
    return fs.kind_of(directory) == FileKind::directory && has_config(fs, directory);
  } catch (const Error&) {
    return false;  // ignored, because this file is not a part of the DCP checkpoint
  }
}

void check_torch_dist_files(const FileSystem& fs, const std::string& directory,
                            const CheckpointContents& contents, const FindingSink& sink) {
  if (is_of_megatron(fs, directory, contents)) check_files(fs, directory, contents, sink);
}

void verify_torch_dist_files(const FileSystem& fs, const std::string& directory,
                             const CheckpointContents& contents, const FindingSink& sink,
                             const ProgressSink& progress, PartOfCheck& part) {
  const bool is_its_part = part.takes(0);
  if (!is_of_megatron(fs, directory, contents)) return;
  if (is_its_part) check_files(fs, directory, contents, sink);
  const std::string path = join_path(directory, kCommonFile);
  if (!has_file(fs, directory, kCommonFile)) return;
  if (!part.takes(fs.open(path)->nbytes())) return;
  try {
    verify_common(fs, path, sink, progress, part);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    sink({.severity = Finding::Severity::error,
          .rule = "structure",
          .where = error.where(),
          .expected = "a torch.save file, as Megatron writes it",
          .found = std::string(error.reason())});
  }
}

}  // namespace tessera::formats::megatron
