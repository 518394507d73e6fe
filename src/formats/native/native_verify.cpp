#include "formats/native/native_verify.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/outside_failure.h"
#include "formats/native/checksum_text.h"
#include "formats/native/chunk_codec.h"
#include "formats/native/patch_reader.h"
#include "formats/native/rank_files.h"
#include "formats/native/stored_blocks.h"
#include "tessera/base/error.h"
#include "tessera/base/parallel.h"

namespace tessera::formats::native {
namespace {

constexpr std::uint64_t kVerifyNbytes = std::uint64_t{1} << 20;

using Findings = std::vector<Finding>;

Finding make_finding(std::string rule, ErrorWhere where, std::string expected, std::string found) {
  return {Finding::Severity::error, std::move(rule), std::move(where), std::move(expected),
          std::move(found)};
}

/// Returns the error as a finding. Throws an Error(io) or Error(interrupted) again, because a
/// failure of the operating system, or a signal, says nothing about the checkpoint.
Finding make_finding(const Error& error, std::string expected) {
  if (tessera::detail::is_outside_failure(error)) throw error;
  return make_finding("structure", error.where(), std::move(expected), std::string(error.reason()));
}

/// Checks that `data_ranges` do not overlap, and that the other bytes after the header are intact.
void check_structure(const ReadableFile& file, std::vector<ByteRange> data_ranges,
                     std::uint64_t expected_checksum, Findings& findings,
                     const ProgressSink& progress) {
  std::ranges::sort(data_ranges, {}, &ByteRange::begin);
  std::uint64_t position = kHeaderNbytes;
  std::uint64_t data_nbytes = 0;
  for (const ByteRange& range : data_ranges) {
    if (range.begin < position || range.end > file.nbytes()) {
      findings.push_back(make_finding("structure",
                                      {.path = file.path(), .fqn = {}, .byte_range = range},
                                      "pieces that do not overlap", "an overlap"));
      return;
    }
    position = range.end;
    data_nbytes += range.nbytes();
  }
  const std::uint64_t checksum = structure_checksum(file, data_ranges);
  if (progress) progress(file.nbytes() - data_nbytes);
  if (checksum != expected_checksum) {
    findings.push_back(make_finding(
        "structure", {.path = file.path()},
        "unchanged bytes outside of tensor data, with checksum " + checksum_text(expected_checksum),
        "changed bytes, with checksum " + checksum_text(checksum)));
  }
}

Findings check_index_file(const FileSystem& fs, const std::string& path,
                          std::uint64_t checkpoint_id, const ProgressSink& progress) {
  Findings findings;
  try {
    const auto file = fs.open(path);
    const FileHeader header = read_header(*file);
    require_index_role(header, path);
    if (header.checkpoint_id != checkpoint_id) {
      findings.push_back(make_finding("structure", {.path = path},
                                      "the id of the checkpoint, " + checksum_text(checkpoint_id),
                                      "another id, " + checksum_text(header.checkpoint_id)));
    }
    check_structure(*file, {}, header.structure_checksum, findings, progress);
  } catch (const Error& error) {
    findings.push_back(make_finding(error, "an undamaged file"));
  }
  return findings;
}

/// The check of one file with pieces.
class FileCheck {
 protected:
  FileCheck(const FileSystem& fs, const std::string& checkpoint_path, const std::string& name,
            const ProgressSink& progress)
      : fs_(fs),
        checkpoint_path_(checkpoint_path),
        path_(join_path(checkpoint_path, name)),
        progress_(progress) {}

  /// Whether to read a piece, or only to find its place in the file.
  enum class Data { check, skip };

  /// Checks a piece that `index` places in this file.
  void check_piece(const Index& index, PieceId id, Data data) {
    check_stored(index.contents->tensors[id.tensor_index].meta.fqn, index.stored(id),
                 index.grid(id), data);
  }

  /// Checks the patch of a piece that `index` places in this file, if the piece has one.
  void check_patch(const Index& index, PieceId id, Data data) {
    const StoredPatch* const patch = index.patch(id);
    if (patch == nullptr) return;
    const TensorMeta& meta = index.contents->tensors[id.tensor_index].meta;
    const std::size_t num_before = findings_.size();
    for (const StoredPiece* const part : {&patch->numbers, &patch->rows}) {
      check_stored(meta.fqn, *part, grid_of(*part), data);
    }
    if (data == Data::skip || findings_.size() != num_before) return;
    try {
      read_row_numbers(*file_, meta, *patch, index.rows(id), [](const auto&) {});
    } catch (const Error& error) {
      findings_.push_back(make_finding(error, "ascending numbers of rows of the piece"));
    }
  }

  void check_stored(const std::string& fqn, const StoredPiece& stored, const BlockGrid& grid,
                    Data data) {
    for (std::uint64_t begin = 0; begin < grid.num_blocks(); begin += kEntriesPerRead) {
      try {
        const auto entries = read_block_entries(
            *file_, fqn, stored, grid, begin, std::min(begin + kEntriesPerRead, grid.num_blocks()));
        for (const StoredBlock& entry : entries) data_ranges_.push_back(entry.range);
        if (data == Data::skip) continue;
        const bool is_compressed = stored.encoding == Encoding::zstd;
        check_blocks(fqn, entries, is_compressed ? grid.block_nbytes : 0);
      } catch (const Error& error) {
        all_entries_are_sound_ = false;
        findings_.push_back(make_finding(error, "an undamaged table of blocks"));
        findings_.back().where.fqn = fqn;
      }
    }
  }

  /// `chunk_nbytes` is 0 if the piece is not compressed.
  void check_blocks(const std::string& fqn, std::span<const StoredBlock> blocks,
                    std::uint64_t chunk_nbytes) {
    for (std::size_t i = 0; i < blocks.size();) {
      // Read consecutive blocks together.
      std::size_t end = i + 1;
      while (end < blocks.size() && blocks[end].range.begin == blocks[end - 1].range.end &&
             blocks[end].range.end - blocks[i].range.begin <= kVerifyNbytes) {
        ++end;
      }
      const ByteRange range{blocks[i].range.begin, blocks[end - 1].range.end};
      if (range.end > file_->nbytes()) {
        findings_.push_back(
            make_finding("structure", {.path = path_, .fqn = fqn, .byte_range = range},
                         "a file of at least " + std::to_string(range.end) + " bytes",
                         std::to_string(file_->nbytes()) + " bytes"));
        all_entries_are_sound_ = false;
        i = end;
        continue;
      }
      buffer_.resize(range.nbytes());
      file_->read_at(range.begin, buffer_);
      for (; i < end; ++i) {
        check_block(fqn, blocks[i],
                    std::span(buffer_).subspan(blocks[i].range.begin - range.begin,
                                               blocks[i].range.nbytes()),
                    chunk_nbytes);
      }
      if (progress_) progress_(range.nbytes());
    }
  }

  void check_block(const std::string& fqn, const StoredBlock& block,
                   std::span<const std::byte> bytes, std::uint64_t chunk_nbytes) {
    const ErrorWhere where{.path = path_, .fqn = fqn, .byte_range = block.range};
    const std::uint64_t checksum = xxh3_64(bytes);
    if (checksum != block.checksum) {
      findings_.push_back(
          make_finding("checksum", where, checksum_text(block.checksum), checksum_text(checksum)));
      return;
    }
    if (chunk_nbytes == 0) return;
    try {
      require_chunk_nbytes(bytes, chunk_nbytes);
    } catch (const Error& error) {
      findings_.push_back(make_finding("structure", where,
                                       "a chunk of the dtype and shape that the index gives",
                                       std::string(error.reason())));
    }
  }

  /// Checks the bytes of the file that belong to no piece. Call this after `check_piece` for all
  /// pieces. Does nothing if a table of blocks is damaged: the places of its blocks are then wrong,
  /// and the table is a finding already.
  void check_rest(std::uint64_t expected_checksum) {
    if (!all_entries_are_sound_) return;
    check_structure(*file_, std::move(data_ranges_), expected_checksum, findings_, progress_);
  }

  static std::string in_words(const TensorMeta& meta) {
    return std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape);
  }

  const FileSystem& fs_;
  const std::string& checkpoint_path_;
  const std::string path_;
  const ProgressSink& progress_;
  std::unique_ptr<ReadableFile> file_;
  std::vector<ByteRange> data_ranges_;
  bool all_entries_are_sound_ = true;
  std::vector<std::byte> buffer_;
  Findings findings_;
};

/// The check of one rank's file.
class RankFileCheck final : FileCheck {
 public:
  RankFileCheck(const FileSystem& fs, const std::string& checkpoint_path, std::int64_t rank,
                std::uint64_t checkpoint_id, const Index& index, std::span<const PieceId> pieces,
                const ProgressSink& progress)
      : FileCheck(fs, checkpoint_path, rank_file_name(rank), progress),
        rank_(rank),
        checkpoint_id_(checkpoint_id),
        index_(index),
        pieces_(pieces) {}

  Findings run() {
    try {
      open();
      if (!file_) return std::move(findings_);
      if (findings_.empty()) check_own_index();
      for (const PieceId id : pieces_) {
        if (index_.storage.file_of(id) == 0) check_piece(index_, id, Data::check);
        check_patch(index_, id, Data::check);
      }
      check_rest(index_.rank_files[static_cast<std::size_t>(rank_)].structure_checksum);
    } catch (const Error& error) {
      findings_.push_back(make_finding(error, "an undamaged file"));
    }
    return std::move(findings_);
  }

 private:
  /// Opens the file. If only its header or its size is wrong, adds a finding, and still opens the
  /// file, so that its data is checked. If it is a file of another checkpoint, `file_` stays null,
  /// because nothing in it can be checked.
  void open() {
    try {
      file_ = open_rank_file(fs_, checkpoint_path_, rank_, checkpoint_id_, index_.rank_files);
      return;
    } catch (const Error& error) {
      findings_.push_back(make_finding(error, "the file of rank " + std::to_string(rank_)));
      const bool only_header_is_damaged = error.where().byte_range == ByteRange{0, kHeaderNbytes};
      const bool size_differs =
          fs_.kind_of(path_) == FileKind::regular &&
          fs_.open(path_)->nbytes() != index_.rank_files[static_cast<std::size_t>(rank_)].nbytes;
      if (!only_header_is_damaged && !size_differs) return;
    }
    file_ = fs_.open(path_);
  }

  /// Compares the rank's entries in the checkpoint's index with the index in the rank file. If they
  /// differ, compares them tensor by tensor, to find a wrong name, dtype or shape. The checksums of
  /// the data do not show these.
  void check_own_index() {
    const RankFileRecord& record = index_.rank_files[static_cast<std::size_t>(rank_)];
    const Index expected = select_pieces(index_, pieces_);
    if (xxh3_64(encode_index(expected)) == record.index_checksum) return;
    const std::size_t num_before = findings_.size();
    const Index own = read_rank_file_index(fs_, checkpoint_path_, rank_,
                                           static_cast<std::int64_t>(index_.rank_files.size()))
                          .index;
    for (const TensorEntry& tensor : expected.contents->tensors) {
      const TensorEntry* const in_file = own.contents->find_tensor(tensor.meta.fqn);
      if (in_file != nullptr && in_file->meta == tensor.meta) continue;
      findings_.push_back(
          make_finding("structure", {.path = path_, .fqn = tensor.meta.fqn},
                       in_words(tensor.meta) + ", as index.h5 says",
                       in_file == nullptr ? "no such tensor" : in_words(in_file->meta)));
    }
    if (findings_.size() == num_before) {
      findings_.push_back(make_finding("structure", {.path = path_},
                                       "the same index of this rank as in index.h5",
                                       "a different one"));
    }
  }

  const std::int64_t rank_;
  const std::uint64_t checkpoint_id_;
  const Index& index_;
  const std::span<const PieceId> pieces_;
};

/// The check of one linked file ([Note: Linked files]).
class LinkedFileCheck final : FileCheck {
 public:
  /// `number`: the position of the file in `index.linked_files`.
  LinkedFileCheck(const FileSystem& fs, const std::string& checkpoint_path, const Index& index,
                  std::size_t number, const ProgressSink& progress)
      : FileCheck(fs, checkpoint_path, index.linked_files[number].name(), progress),
        index_(index),
        number_(number),
        linked_(index.linked_files[number]) {}

  Findings run() {
    try {
      file_ = open_linked_file(fs_, checkpoint_path_, linked_);
      const Index own = read_linked_file_index(fs_, checkpoint_path_, linked_).index;
      if (own.chunk_nbytes != linked_.chunk_nbytes) {
        findings_.push_back(make_finding(
            "structure", {.path = path_},
            "chunks of " + std::to_string(linked_.chunk_nbytes) + " bytes, as index.h5 says",
            std::to_string(own.chunk_nbytes) + " bytes"));
      }
      find_wanted();
      for (std::size_t t = 0; t < own.contents->tensors.size(); ++t) {
        for (std::size_t p = 0; p < own.contents->tensors[t].pieces.size(); ++p) {
          check_patch(own, {t, p}, Data::skip);
          if (own.storage.file_of({t, p}) != 0) continue;
          check_piece(own, {t, p}, take_wanted(own, t, p) ? Data::check : Data::skip);
        }
      }
      for (const auto& [place, wanted] : wanted_) {
        findings_.push_back(make_finding("structure",
                                         {.path = path_, .fqn = wanted.tensor->meta.fqn},
                                         "the piece " + region_to_string(wanted.region) + " of " +
                                             in_words(wanted.tensor->meta) + ", as index.h5 says",
                                         "no such piece"));
      }
      check_rest(linked_.record.structure_checksum);
    } catch (const Error& error) {
      findings_.push_back(make_finding(error, "an undamaged file of the base"));
    }
    return std::move(findings_);
  }

 private:
  /// A piece of the checkpoint whose bytes are in this file.
  struct Wanted {
    const TensorEntry* tensor;
    Region region;
    StoredPiece stored;
  };

  /// Fills `wanted_` with the pieces of the checkpoint whose bytes are in this file.
  void find_wanted() {
    for (std::size_t t = 0; t < index_.contents->tensors.size(); ++t) {
      const TensorEntry& tensor = index_.contents->tensors[t];
      for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
        const StoredPiece stored = index_.stored({t, p});
        if (stored.file != number_ + 1) continue;
        wanted_.emplace(stored.begin, Wanted{&tensor, tensor.pieces[p].region, stored});
      }
    }
  }

  /// Whether `wanted_` has a piece that equals this piece of the file's own index. If so, removes
  /// it from `wanted_`.
  bool take_wanted(const Index& own, std::size_t t, std::size_t p) {
    const StoredPiece stored = own.stored({t, p});
    const auto [begin, end] = wanted_.equal_range(stored.begin);
    bool is_wanted = false;
    for (auto at = begin; at != end;) {
      const auto& [tensor, region, wanted] = at->second;
      const bool is_same =
          tensor->meta == own.contents->tensors[t].meta &&
          region == own.contents->tensors[t].pieces[p].region &&
          std::tie(wanted.encoding, wanted.stored_nbytes, wanted.checksum_or_table) ==
              std::tie(stored.encoding, stored.stored_nbytes, stored.checksum_or_table);
      is_wanted = is_wanted || is_same;
      at = is_same ? wanted_.erase(at) : std::next(at);
    }
    return is_wanted;
  }

  const Index& index_;
  const std::size_t number_;
  const LinkedFile& linked_;
  std::multimap<std::uint64_t, Wanted> wanted_;  // key: begin of the piece's bytes
};

}  // namespace

void check_rank_files(const FileSystem& fs, const std::string& path, std::uint64_t checkpoint_id,
                      const Index& index, const FindingSink& sink) {
  for (std::size_t rank = 0; rank < index.rank_files.size(); ++rank) {
    try {
      open_rank_file(fs, path, static_cast<std::int64_t>(rank), checkpoint_id, index.rank_files);
    } catch (const Error& error) {
      sink(make_finding(error, "the file of rank " + std::to_string(rank)));
    }
  }
  for (const LinkedFile& file : index.linked_files) {
    try {
      open_linked_file(fs, path, file);
    } catch (const Error& error) {
      sink(make_finding(error, "a file of the base"));
    }
  }
}

void verify_checkpoint(const FileSystem& fs, const std::string& path, std::uint64_t checkpoint_id,
                       const Index& index, const FindingSink& sink, const ProgressSink& progress,
                       int num_threads, PartOfCheck& part) {
  const auto report = [&](const Findings& findings) {
    for (const Finding& finding : findings) sink(finding);
  };
  if (part.takes(0)) {
    report(check_index_file(fs, join_path(path, kIndexFileName), checkpoint_id, progress));
  }
  const auto pieces = pieces_by_rank(index.contents);
  std::vector<std::uint64_t> nbytes;  // of the ranks' files, then of the linked files
  for (const RankFileRecord& record : index.rank_files) nbytes.push_back(record.nbytes);
  for (const LinkedFile& file : index.linked_files) nbytes.push_back(file.record.nbytes);
  std::vector<std::size_t> taken;
  PartOfCheck ahead = part;
  for (std::size_t file = 0; file < nbytes.size(); ++file) {
    if (ahead.takes(nbytes[file])) taken.push_back(file);
  }
  std::vector<Findings> findings(nbytes.size());
  parallel_for(static_cast<std::int64_t>(taken.size()),
               num_threads > 0 ? num_threads : default_num_threads(), {}, [&](std::int64_t task) {
                 const std::size_t file = taken[static_cast<std::size_t>(task)];
                 findings[file] =
                     file < pieces.size()
                         ? RankFileCheck(fs, path, static_cast<std::int64_t>(file), checkpoint_id,
                                         index, pieces[file], progress)
                               .run()
                         : LinkedFileCheck(fs, path, index, file - pieces.size(), progress).run();
               });
  for (std::size_t file = 0; file < nbytes.size(); ++file) {
    if (part.takes(nbytes[file])) report(findings[file]);
  }
}

}  // namespace tessera::formats::native
