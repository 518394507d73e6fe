#include <optional>
#include <utility>

#include "formats/key_paths.h"
#include "formats/staging/shared_work.h"
#include "formats/staging/staged_destination.h"
#include "object_store/files.h"
#include "reshard/equal_pieces_text.h"
#include "reshard/store_save.h"
#include "tessera/base/error.h"
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/parts.h"
#include "tessera/reshard/base_comparison.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/job_state.h"
#include "tessera/reshard/store_destination.h"

namespace tessera::reshard {
namespace {

constexpr std::size_t kMaxListed = 100;  // problems that an error lists

/// Removes older checkpoints. Returns a line for each that stays, because its folder has other
/// files too. If the removal fails, the error says that the new checkpoint is complete.
std::vector<std::string> remove_older(FileSystem& fs, const std::string& path, int num_kept) {
  std::vector<std::string> left;
  try {
    formats::keep_last(fs, directory_of(path), num_kept, last_component(path),
                       [&](const std::string& old, const std::string& entry) {
                         left.push_back(printable(old) +
                                        ": older checkpoint: not removed, because '" +
                                        printable(entry) + "' in its folder is not a part of it");
                       });
    return left;
  } catch (const Error& error) {
    throw Error(error.kind(), error.where(),
                std::string(error.reason()) + " (the new checkpoint " + path +
                    " is complete; older ones could not be removed)");
  }
}

}  // namespace

formats::Format format_of_parts(formats::Format format) {
  return formats::traits_of(format).is_written_in_parts ? format : formats::Format();
}

struct RankSave::State {
  /// What rank 0 needs to write a format of one file, from the parts that the ranks write first.
  struct OneFile {
    Plan plan;
    std::unique_ptr<formats::CheckpointWriter> writer;
  };

  std::string path;
  int rank;
  RankSaveOptions options;
  std::string directory;  // where the ranks write their parts
  formats::CheckpointContents contents{};
  std::vector<Value> values{};
  std::vector<std::string> left_checkpoints{};
  // File systems that the members below use.
  std::optional<StoreSave> store{};              // if the path is on an object store
  std::optional<StoreDestination> one_object{};  // on rank 0, for a single file on an object store
  std::unique_ptr<formats::StagedDestination> staged{};  // on rank 0; removes its files at the end
  std::optional<OneFile> one_file{};                     // on rank 0, for a format of one file
  std::shared_ptr<const formats::BaseCheckpoint> base{};
  formats::ChangedRows changed_rows{};  // of this rank's pieces

  /// Opens the base checkpoint, if the options name one.
  void open_base() {
    if (options.base.empty() || base) return;
    base = formats::BaseCheckpoint::open(*options.file_system,
                                         without_trailing_slashes(options.base), options.format);
  }
  /// Returns the file system in which the ranks write their parts.
  FileSystem& file_system() { return store ? store->file_system() : *options.file_system; }
  bool is_one_file() const { return format_of_parts(options.format) != options.format; }
  formats::PartOptions part_options() const {
    return {format_of_parts(options.format), options.native};
  }
};

RankSave::RankSave(std::string path, int rank, RankSaveOptions options)
    : state_(new State{.path = without_trailing_slashes(std::move(path)),
                       .rank = rank,
                       .options = std::move(options),
                       .directory = {}}) {
  if (!object_store::is_on_store(state_->path)) return;
  object_store::forget(state_->path);  // the user's keys may have changed since the last save
  state_->store.emplace(state_->path, *state_->options.file_system);
}

RankSave::~RankSave() = default;

const std::string& RankSave::path() const {
  return state_->path;
}
const RankSaveOptions& RankSave::options() const {
  return state_->options;
}

const std::vector<std::string>& RankSave::left_checkpoints() const {
  return state_->left_checkpoints;
}

std::string RankSave::stage() {
  std::string path = state_->path;
  OverwritePolicy overwrite = state_->options.overwrite;
  if (state_->store && !state_->options.base.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "checkpoint with a base",
                          "a local folder, because files of the base become hard links", "a URL");
  }
  state_->open_base();
  if (state_->base) formats::check_base(*state_->options.file_system, state_->options.base, path);
  if (state_->store) {
    path = state_->store->begin(overwrite);
    overwrite = OverwritePolicy::refuse;  // the spool is a new folder for each save
  }
  state_->staged = std::make_unique<formats::StagedDestination>(
      state_->file_system(), state_->is_one_file() ? path + ".parts" : path,
      DestinationKind::directory, overwrite);
  formats::SharedWork(state_->file_system(), state_->staged->destination()).remove_ended();
  return state_->staged->staging_path();
}

void RankSave::set_contents(std::string directory, formats::CheckpointContents contents,
                            std::vector<Value> values) {
  // Ranks may hold a value and a dict under one name.
  formats::check_key_paths(contents, state_->path);
  state_->directory = std::move(directory);
  state_->contents = std::move(contents);
  state_->values = std::move(values);
}

void RankSave::start_one_file() {
  if (!state_->is_one_file()) return;
  const RankSaveOptions& options = state_->options;
  State::OneFile file;
  file.plan = plan_reshard(state_->contents, state_->path, {.format = options.format});
  if (const auto& problems = file.plan.problems; !problems.empty()) {
    throw Error::listing(
        ErrorKind::mismatch, {.path = state_->path},
        "the format " + std::string(options.format.name()) + " cannot hold this state",
        problems_to_string(problems, kMaxListed));
  }
  std::vector<Value> moved;
  for (const std::size_t i : file.plan.value_sources) moved.push_back(state_->values[i]);
  if (!state_->store) {
    file.writer = formats::create_checkpoint(
        *options.file_system, state_->path, file.plan.destination, std::move(moved),
        {.format = options.format, .overwrite = options.overwrite});
  } else {
    // Discards what an interrupted save has uploaded: the job's state has changed since then.
    StoreDestination& object = state_->one_object.emplace(
        state_->path, StoreOptions{.format = options.format,
                                   .overwrite = options.overwrite,
                                   .kept_work = formats::KeptWork::discard});
    file.writer = object.run([&] {
      return formats::create_checkpoint(object.file_system(), object.path(), file.plan.destination,
                                        std::move(moved), {.format = options.format});
    });
  }
  state_->one_file = std::move(file);
}

std::string RankSave::compare_with_base(const Plan& plan, const formats::TensorSource& source) {
  state_->open_base();
  if (!state_->base) return {};
  formats::PieceMatches matches = find_equal_pieces(
      plan, source, *state_->base,
      state_->options.changed_rows ? RowChanges::write_rows : RowChanges::write_piece,
      {.memory_nbytes = state_->options.memory_nbytes}, state_->rank);
  std::string text = equal_pieces_to_text(
      *state_->base, formats::pair_pieces(state_->contents, state_->base->reader().contents()),
      matches, RowsInText::leave_out);
  state_->changed_rows = std::move(matches.changed_rows);
  return text;
}

void RankSave::link_equal_pieces(const std::vector<std::string>& texts) {
  if (!state_->base) return;
  const auto pairs = formats::pair_pieces(state_->contents, state_->base->reader().contents());
  formats::PieceMatches matches =
      equal_pieces_from_texts(*state_->base, state_->contents, pairs, texts, state_->path);
  for (auto& [piece, rows] : state_->changed_rows) {
    matches.changed_rows.at(piece) = std::move(rows);
  }
  state_->options.native.linked =
      formats::link_pieces(state_->base, state_->contents, std::move(matches));
}

std::uint64_t RankSave::linked_nbytes() const {
  std::uint64_t nbytes = 0;
  if (!state_->options.native.linked) return nbytes;
  for (const formats::PiecePair& pair : state_->options.native.linked->pairs) {
    const formats::TensorEntry& tensor = state_->contents.tensors[pair.piece.tensor_index];
    if (tensor.pieces[pair.piece.piece_index].rank != state_->rank) continue;
    nbytes += linked_nbytes_of(*state_->options.native.linked, state_->contents, pair.piece);
  }
  return nbytes;
}

void RankSave::write(const Plan& plan, const formats::TensorSource& source) {
  FileSystem& fs = state_->file_system();
  if (state_->store && fs.kind_of(state_->directory) != FileKind::directory) {
    throw Error::expected(ErrorKind::not_found, {.path = state_->directory}, "spool",
                          "a folder that rank 0 made and all ranks can see", "none on this rank",
                          "set TMPDIR to a folder that all ranks share");
  }
  const auto writer = formats::create_part(fs, state_->directory, state_->contents, state_->values,
                                           state_->rank, state_->part_options());
  execute(plan, source, *writer, {.memory_nbytes = state_->options.memory_nbytes});
  writer->commit();
}

std::uint64_t RankSave::join() {
  const std::uint64_t token =
      formats::join_parts(state_->file_system(), state_->directory, state_->contents,
                          state_->values, state_->part_options());
  if (state_->store && !state_->is_one_file()) state_->store->remove_old_files();
  return token;
}

void RankSave::seal(std::uint64_t token) {
  formats::seal_part(state_->file_system(), state_->directory, state_->rank, token,
                     state_->part_options());
  if (state_->store && !state_->is_one_file()) state_->store->upload_own_files(state_->directory);
}

void RankSave::finish() {
  FileSystem& fs = state_->file_system();
  // Moved into locals, so that their destructors run when this call ends, also if it throws. They
  // undo what is not committed, before the caller sees the error.
  const std::unique_ptr<formats::StagedDestination> staging = std::move(state_->staged);
  const std::optional<State::OneFile> file = std::exchange(state_->one_file, std::nullopt);
  formats::finish_parts(fs, state_->directory, state_->contents, state_->values,
                        state_->part_options());
  if (file) {
    const auto finish_file = [&] {
      const auto reader = formats::open_checkpoint(fs, state_->directory);
      execute(file->plan, *reader, *file->writer, {.memory_nbytes = state_->options.memory_nbytes});
      file->writer->commit();
    };
    if (state_->one_object) {
      state_->one_object->run(finish_file);
    } else {
      finish_file();
    }
  } else if (state_->store) {
    // The destructor of `staging` removes the local files.
    state_->store->finish(state_->directory);
  } else {
    staging->commit();
  }
  if (state_->options.keep_last > 0) {
    state_->left_checkpoints = remove_older(state_->store ? object_store::files() : fs,
                                            state_->path, state_->options.keep_last);
  }
}

}  // namespace tessera::reshard
