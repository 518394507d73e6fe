// Each driver says whether a path holds its format (src/formats/<format>/driver.cpp). This file
// chooses the driver with the strongest match.
#include "tessera/formats/detect.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "base/word_list.h"
#include "formats/bin/bin_files.h"
#include "formats/file_names.h"
#include "formats/flat_layout.h"
#include "formats/other_formats.h"
#include "formats/staging/shared_work.h"
#include "formats/staging/staged_destination.h"
#include "object_store/stored_objects.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

Error refusal(ErrorKind kind, const std::string& path, std::string_view what) {
  return Error(kind, {.path = path}, what);
}

struct BestMatch {
  const FormatDriver* driver = nullptr;
  Recognition recognition{};
};

/// Returns the strongest match of all drivers. If several are equally strong, returns the first
/// one.
template <class Recognize>
BestMatch best_match(const Recognize& recognize) {
  BestMatch best;
  for (const FormatDriver* driver : format_drivers()) {
    Recognition recognition = recognize(*driver);
    if (recognition.match > best.recognition.match) best = {driver, std::move(recognition)};
  }
  return best;
}

BestMatch match_of_directory(const DirectoryListing& directory) {
  return best_match(
      [&](const FormatDriver& driver) { return driver.recognize_directory(directory); });
}

/// Joins the text `member` of all drivers' descriptions: "a, b or c".
std::string described(std::string_view FormatDescription::*member) {
  std::vector<std::string_view> texts;
  for (const FormatDriver* driver : format_drivers()) {
    const std::string_view text = driver->description().*member;
    if (!text.empty()) texts.push_back(text);
  }
  return tessera::detail::choice_of(texts);
}

/// Whether the names in a directory show that it is a checkpoint. Returns false for a directory
/// that cannot be listed: the result is only used for a hint.
bool is_checkpoint_by_names(const FileSystem& fs, const std::string& directory) {
  try {
    const std::vector<std::string> names = fs.list_directory(directory);
    const BestMatch best = match_of_directory({directory, names});
    return best.recognition.match >= Match::by_name && !best.recognition.refusal;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::interrupted) throw;
    return false;
  }
}

/// Returns the names of checkpoints among a directory's first entries, for a message.
std::vector<std::string> checkpoints_within(const FileSystem& fs, const std::string& path,
                                            std::span<const std::string> names) {
  constexpr std::size_t kMaxLookedAt = 64;
  std::vector<std::string> found;
  for (const std::string& name : names.first(std::min(names.size(), kMaxLookedAt))) {
    const std::string below = join_path(path, name);
    if (fs.kind_of(below) != FileKind::directory || !is_checkpoint_by_names(fs, below)) continue;
    found.push_back(name);
  }
  return found;
}

/// Returns words for the files of ranks in which Hugging Face's Trainer and accelerate save an FSDP
/// model, beside the optimizer's folder; empty without such files.
std::string files_of_ranks(std::span<const std::string> names) {
  const auto first = std::ranges::find_if(names, [](const std::string& name) {
    if (!name.starts_with(bin::kModelBegin)) return false;
    const std::string_view end = std::string_view(name).substr(bin::kModelBegin.size());
    return is_name_like(end, "_fsdp_rank#.bin") || is_name_like(end, "_fsdp_#_rank#.bin");
  });
  return first == names.end() ? "" : ", and files of ranks, such as " + printable(*first);
}

/// Returns the error for a directory that is no checkpoint itself, but contains folders that are.
/// `names`: all names in the directory.
Error refusal_of_folders(const std::string& path, const std::vector<std::string>& folders,
                         std::span<const std::string> names) {
  constexpr std::size_t kMaxListed = 3;
  std::string list;
  for (const std::string& name : std::span(folders).first(std::min(folders.size(), kMaxListed))) {
    list += (list.empty() ? "" : ", ") + printable(name);
  }
  if (folders.size() > kMaxListed) list += ", …";
  return refusal(ErrorKind::unsupported, path,
                 "expected a checkpoint, found a directory that has checkpoints in it: " + list +
                     files_of_ranks(names) + " (give the path of one, or merge them)");
}

Format format_of(const BestMatch& best) {
  if (best.recognition.refusal) throw *best.recognition.refusal;
  return best.driver->format();
}

Format format_of_directory(const FileSystem& fs, const std::string& path) {
  const std::vector<std::string> names = fs.list_directory(path);
  if (std::ranges::find(names, object_store::kIncompleteMark) != names.end()) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint", "a complete one",
                          "'" + std::string(object_store::kIncompleteMark) + "' beside its files",
                          "a run is writing or removing it, or was interrupted");
  }
  const DirectoryListing directory{path, names};
  const BestMatch best = match_of_directory(directory);
  if (best.driver != nullptr) {
    if (auto refusal = refusal_of_mixture(fs, directory, *best.driver)) throw *std::move(refusal);
    if (best.recognition.refusal && best.recognition.match == Match::hint) {
      const std::vector<std::string> folders = checkpoints_within(fs, path, names);
      if (!folders.empty()) throw refusal_of_folders(path, folders, names);
    }
    return format_of(best);
  }
  if (names.empty()) {
    throw refusal(ErrorKind::unsupported, path, "expected a checkpoint, found an empty directory");
  }
  std::string what = "expected a checkpoint (" + described(&FormatDescription::in_directory) +
                     "), found a directory with none of them";
  const std::vector<std::string> within = checkpoints_within(fs, path, names);
  if (within.size() > 1) throw refusal_of_folders(path, within, names);
  if (!within.empty()) what += " (did you mean " + printable(join_path(path, within[0])) + "?)";
  throw refusal(ErrorKind::unsupported, path, what);
}

Format format_of_file(const FileSystem& fs, const std::string& path) {
  const std::string begin = read_begin(fs, path, FileBegin::kMaxNbytes).value_or("");
  const BestMatch best = best_match([&](const FormatDriver& driver) {
    return driver.recognize_file({path, begin});
  });
  if (begin.empty() && best.recognition.match < Match::certain) {
    throw refusal(ErrorKind::corruption, path,
                  "expected a checkpoint, found an empty file (incomplete download?)");
  }
  if (best.driver != nullptr) return format_of(best);
  throw refusal(ErrorKind::unsupported, path,
                "expected a checkpoint (" + described(&FormatDescription::as_file) +
                    ", or a directory), found a file of another kind");
}

}  // namespace

Format detect_format(const FileSystem& fs, const std::string& path) {
  const auto kind = fs.kind_of(path);
  if (!kind) {
    const std::string old_path = StagedDestination::old_path_of(path);
    const bool has_old = StagedDestination::is_in_exchange(fs, path, DestinationKind::file);
    throw refusal(
        ErrorKind::not_found, path,
        "expected a checkpoint, found nothing" +
            (has_old ? " (an interrupted run left the old checkpoint at " + printable(old_path) +
                           "; the next run that writes here puts "
                           "it back)"
                     : std::string()));
  }
  if (*kind == FileKind::other) {
    throw refusal(ErrorKind::unsupported, path,
                  "expected a checkpoint, found a device, pipe or socket (`ckpt-inspect` reads a "
                  "pipe as standard input, `-`)");
  }
  return *kind == FileKind::directory ? format_of_directory(fs, path) : format_of_file(fs, path);
}

void require_no_work_in_progress(const FileSystem& fs, const std::string& path) {
  if (!StagedDestination::is_work_in_progress(fs, path)) return;
  if (SharedWork::is_begun_at(fs, path)) {
    throw Error(ErrorKind::corruption, {.path = path},
                "unfinished checkpoint: several workers write it, or were interrupted (wait for "
                "them; `ckpt-reshard finish` says which parts are missing)");
  }
  if (StagedDestination::is_being_written(fs, path)) {
    throw Error(ErrorKind::corruption, {.path = path},
                "unfinished checkpoint: a `ckpt-reshard` run is writing it (wait until it ends)");
  }
  throw Error(ErrorKind::corruption, {.path = path},
              "unfinished checkpoint: a `ckpt-reshard` run was interrupted here",
              {Remedy::Action::resume_or_discard});
}

void require_classes_found(const std::vector<std::string>& as_dict,
                           std::initializer_list<const CheckpointContents*> checkpoints,
                           const std::string& option) {
  for (const std::string& name : as_dict) {
    const auto is_in = [&](const CheckpointContents* contents) {
      return std::ranges::any_of(contents->opened_classes, [&](const OpenedClass& opened) {
        return opened.as == OpenedClass::As::dict && opened.name == name;
      });
    };
    if (std::ranges::any_of(checkpoints, is_in)) continue;
    throw Error::expected(ErrorKind::invalid_argument, {}, option,
                          "a class whose objects can be read as dicts",
                          "no object of class '" + printable(name) + "' that can be read as a dict",
                          "check the spelling");
  }
}

std::unique_ptr<CheckpointReader> open_checkpoint(const FileSystem& fs, const std::string& path,
                                                  const OpenOptions& options) {
  require_no_work_in_progress(fs, path);
  std::unique_ptr<CheckpointReader> reader =
      driver_of(detect_format(fs, path)).open_with_classes(fs, path, options.as_dict);
  if (options.flat_layout_path.empty()) return reader;
  return apply_flat_layout(std::move(reader), read_flat_layout(fs, options.flat_layout_path));
}

}  // namespace tessera::formats
