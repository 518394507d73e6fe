#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/base/shared_text.h"
#include "tessera/base/shared_vector.h"
#include "tessera/base/tensor_meta.h"
#include "tessera/base/value.h"
#include "tessera/formats/format.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/layout/region.h"

namespace tessera::formats {

/// How a tensor's elements relate to a parameter. This decides how the tensor reshards.
/// The numbers are stored on disk: never change one.
enum class StateKind : std::uint8_t {
  plain = 0,               // a parameter or buffer, not state of another tensor
  pointwise = 1,           // one element per element of its parameter (exp_avg)
  row_wise = 2,            // one element per row of its parameter (row-wise Adagrad)
  scalar_parameter = 3,    // one value per parameter (step)
  scalar_table = 4,        // one value per embedding table (iter)
  opaque = 5,              // moved as a whole, never cut
  row_wise_per_shard = 6,  // as row_wise, but once per column shard (torchrec); merging is lossy
};

/// Returns the enumerator's name, such as `row_wise_per_shard`.
std::string_view state_kind_name(StateKind kind);

/// A dict key that is not a string, such as the numbers in the `state` of an optimizer.
struct NonStringKey {
  std::string json;  // the key as JSON text, which `dict_key_value` decodes
  friend auto operator<=>(const NonStringKey&, const NonStringKey&) = default;
};

/// What leads one level down in a nested state dict: a string key of a dict, a position in a list
/// (std::int64_t, from 0), or a key of a dict that is not a string.
using Key = std::variant<std::string, std::int64_t, NonStringKey>;

/// The keys that lead to an entry of the nested state dict, outermost first.
using KeyPath = std::vector<Key>;

/// A key path whose copies share memory. A move has each path twice: in its source and destination.
using SharedKeyPath = SharedVector<Key>;

/// Returns a dict's key as a `Key`: a string or a NonStringKey; nothing if Python cannot hash it.
std::optional<Key> dict_key(const Value& key);

/// Returns the key as a Value, which undoes `dict_key`. Requires: `dict_key` returned `key`.
Value dict_key_value(const NonStringKey& key);

/// Returns the flattened key (fqn): the path's keys joined by dots, each as Python's str() spells
/// it.
std::string spell(const KeyPath& path);

/// Returns the path as a list, in a form to store: strings and positions as they are; a key that is
/// not a string as a list of one item, the key.
Value key_path_to_value(const KeyPath& path);
/// Undoes `key_path_to_value`. Returns nothing for a value that is no result of that function.
std::optional<KeyPath> key_path_from_value(const Value& value);

/// A region of a tensor together with the rank whose file holds it.
struct Piece {
  Region region;
  int rank = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

// [Note: Order of keys] Lists of entries are sorted by name, which loses the order of the keys of a
// Python dict. To keep that order, each entry has a number, `dict_order`. The place of a key in its
// dict is the smallest number of the entries under this key: smaller numbers come first. Keys with
// equal numbers are in the order of the type Key. A reader that knows no order gives every entry a
// 0. Numbers may have gaps, because a move can leave entries out.

/// A logical (unsharded) tensor with the pieces that cover it. Pieces with equal regions are
/// replicas. Tensors of equal shapes and cuts may share one list of pieces. Kept small: a move has
/// two entries for each tensor, one of the source and one of the destination.
struct TensorEntry {
  TensorMeta meta;
  StateKind kind = StateKind::plain;
  std::uint32_t dict_order = 0;  // [Note: Order of keys]
  SharedText parameter{};        // of optimizer state: the fqn of its parameter; else empty
  SharedKeyPath key_path{};      // empty: the fqn is a top-level key
  SharedVector<Piece> pieces{};
};

/// A value that is not a tensor, under its flattened key.
struct ValueEntry {
  std::string name;
  SharedKeyPath key_path{};
  std::uint32_t dict_order = 0;  // [Note: Order of keys]
};

/// A second name of a tensor (tied weights). `target` is the fqn of a tensor, never of another
/// alias.
struct Alias {
  std::string fqn;
  std::string target;
  SharedKeyPath key_path{};
  std::uint32_t dict_order = 0;  // [Note: Order of keys]
};

/// A Python class whose objects a reader turned into entries or dicts, without running any code of
/// the class.
struct OpenedClass {
  enum class As {
    dict,    // its attributes are entries, as OpenOptions::as_dict asked
    module,  // a torch.nn.Module: its parameters and buffers are entries, as in its state_dict()
  };
  std::string name;  // `argparse.Namespace`
  As as = As::dict;
  std::size_t num_objects = 0;  // a module inside another module does not count

  friend bool operator==(const OpenedClass&, const OpenedClass&) = default;
};

/// Returns `opened` in words: `2 objects of class argparse.Namespace, read as dicts`.
std::string opened_class_in_words(const OpenedClass& opened);

/// Says which part of a checkpoint was opened, if the opened path is not the whole checkpoint but
/// only one of its parts.
struct PartOfWhole {
  /// What one part contains.
  enum class Unit {
    rank,  // what one process saved
    file,  // one of the several files of a model
  };

  Unit unit = Unit::rank;
  std::string form{};                        // `DeepSpeed ZeRO stage 2, optimizer state`
  std::optional<std::uint64_t> num_parts{};  // empty: the part does not say how many
  std::string series{};      // of a numbered file: its path up to the number; empty: no number
  std::uint64_t number = 0;  // this file's number, from 1; only if `series` is not empty

  friend bool operator==(const PartOfWhole&, const PartOfWhole&) = default;
};

/// Returns `part` in words: `one rank of 8: DeepSpeed ZeRO stage 2, optimizer state`.
std::string part_in_words(const PartOfWhole& part);

/// One result of a check. Rules are stable words, such as `checksum`, `coverage`, `structure`; all
/// of them are in docs/cli/ckpt-inspect.md.
struct Finding {
  /// A note does not make a checkpoint invalid.
  enum class Severity { note, error } severity = Severity::error;
  std::string rule;
  ErrorWhere where;
  std::string expected;
  std::string found;
  Remedy remedy{};  // what the caller can do about it
};

/// Something in the source that CheckpointContents cannot express, so that the reader replaced it
/// by something simpler, or dropped it.
struct Simplification {
  enum class Kind {
    requires_grad,    // the flag of a tensor: dropped
    parameter,        // a torch.nn.Parameter: read as a tensor
    shared_memory,    // a tensor that shares memory with another one: read as a separate tensor
    dict_class,       // an OrderedDict, defaultdict or Counter: read as a dict
    tuple,            // a tuple with a tensor in it: read as a list
    attributes,       // attributes that a program set on a tensor or an OrderedDict: dropped
    value_type,       // a frozenset, torch.Size or the like in a value: read as a plainer type
    dtensor,          // a DTensor or ShardedTensor in a file of its own: read as a tensor
    dtensor_of_rank,  // the same in the files of the only rank: joined, which no move reports
  };
  Kind kind;
  std::string name;  // of the tensor; of a dict or tuple: what its entries' names start with
  std::vector<std::string> what{};  // names of attributes (the first ones), or of types

  friend bool operator==(const Simplification&, const Simplification&) = default;
};

/// All that a checkpoint holds except tensor data and the values themselves: what a reader found,
/// or what a writer is to write. `tensors`, `values` and `aliases` are each sorted by name (byte
/// order), and no name occurs twice in the three lists together.
struct CheckpointContents {
  int world_size = 1;
  std::vector<TensorEntry> tensors{};
  std::vector<ValueEntry> values{};
  std::vector<Alias> aliases{};
  std::vector<FlatUnit> units{};                     // FSDP1's flat parameters; empty if not known
  std::map<std::string, std::string> annotations{};  // free text stored with the checkpoint
  std::vector<std::string> missing_files{};          // that the checkpoint names, but lacks
  std::vector<OpenedClass> opened_classes{};         // what a reader found, sorted by name
  std::optional<PartOfWhole> part{};                 // set by a reader that sees only a part
  std::vector<Simplification> simplifications{};     // what a reader made simpler
  /// Problems and notes that a reader found while it opened the checkpoint, and that every user
  /// should know. The planner refuses to move a checkpoint whose list has errors, unless
  /// PlanOptions::missing allows it.
  std::vector<Finding> opening_findings{};

  const TensorEntry* find_tensor(std::string_view fqn) const;  // nullptr for an alias
};

/// Where a piece's bytes are stored, to show to people.
struct PieceStorage {
  std::string file;                     // relative to the checkpoint; in a merge, the whole path
  std::optional<ByteRange> byte_range;  // empty if the piece is not one range of the file
  std::string encoding;                 // `plain`, `zstd`, `big-endian`, `patched`
  std::uint64_t stored_nbytes = 0;      // bytes on disk, with those of a patch
};

/// The pieces and values whose files are missing, each with the name of its file.
struct MissingData {
  using Pieces = std::map<std::size_t, std::string>;  // key: index of the piece

  std::map<std::size_t, Pieces> pieces{};       // key: index of the tensor; only non-empty pieces
  std::map<std::size_t, std::string> values{};  // key: index of the value
};

/// Returns a finding as an Error(mismatch): `<where>: <rule>: expected <x>, found <y> (<remedy>)`.
Error finding_to_error(const Finding& finding);
/// Returns the finding as one line. The remedy is written for C++ callers: `CreateOptions::...`.
std::string finding_to_string(const Finding& finding);

/// Is called with each finding, never by two threads at the same time.
using FindingSink = std::function<void(const Finding&)>;

/// Receives the number of bytes just processed. Several threads may call it at the same time.
using ProgressSink = std::function<void(std::uint64_t nbytes)>;

/// The source of a move: tensors whose bytes can be read piece by piece, from an open checkpoint or
/// from a trainer's memory. Thread-safe.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// Returns the contents. They live as long as this object.
  virtual const CheckpointContents& contents() const = 0;

  /// Fills `out` with the elements `[range.begin, range.end)` of one piece, numbered from 0 in the
  /// row-major order of the piece's region. Little-endian. Checks all checksums of what it reads.
  /// Requires: `out.size() == range.numel() * itemsize`.
  /// Throws: Error(corruption) that names file, tensor and byte range; Error(io).
  virtual void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                          std::span<std::byte> out) const = 0;
};

/// An open checkpoint. All calls are read-only and thread-safe; they open files when they first
/// need them. Opening has checked `contents()`: dtypes known, shapes bounded, regions inside their
/// tensor, names unique. Opening does not check that the pieces cover each tensor, so that a
/// checkpoint with holes can still be inspected; a caller that needs this calls `check_coverage`.
class CheckpointReader : public TensorSource {
 public:
  /// Returns the checkpoint's format; for a merge, the format of the first source.
  virtual Format format() const = 0;
  /// Returns the path that was opened.
  virtual const std::string& path() const = 0;

  /// Returns the names of tensors and aliases in the saved state dict's order: one list, or in a
  /// merge one for each source. If the order is not known, there is no list, or it is empty.
  virtual std::vector<std::vector<std::string>> dict_orders() const { return {}; }

  /// Returns the value of the entry `contents().values[value_index]`. May throw Error(unsupported).
  virtual Value read_value(std::size_t value_index) const = 0;

  /// Returns where the bytes of a piece are stored. `piece_index` counts within the tensor.
  virtual PieceStorage piece_storage(std::size_t tensor_index, std::size_t piece_index) const = 0;

  /// Checks that every file that the checkpoint names exists, has the right size and, as far as the
  /// format can tell, belongs to it. Reads no tensor data. After a finding, continues if it can.
  /// Throws: Error(io).
  virtual void check_files(const FindingSink& sink) const = 0;

  /// Returns the paths of the files that hold tensor bytes, as FileSystem::open takes them. A file
  /// in the list may be missing. Empty if the bytes are in memory.
  virtual std::vector<std::string> data_files() const = 0;

  /// Returns the pieces and values whose files are missing. Opens no file. Always empty for formats
  /// in which a checkpoint with a missing file cannot be opened.
  /// Throws: Error(io).
  virtual MissingData find_missing_data() const { return {}; }

  /// Checks the checkpoint as far as its format allows: every stored byte that has a checksum, the
  /// structure, and whether all files exist. May skip what opening has checked. Continues after a
  /// finding where it can. At most `num_threads` threads read; 0: default_num_threads(). Findings
  /// do not depend on the number of threads. Requires: `sink` and `progress` are not empty.
  virtual void verify(const FindingSink& sink, const ProgressSink& progress,
                      int num_threads) const = 0;
  void verify(const FindingSink& sink, const ProgressSink& progress) const {
    verify(sink, progress, 0);
  }
};

/// The writer of one checkpoint. It knows everything except the tensors' bytes from the start.
///
/// Life cycle: `create_checkpoint` makes it, from the destination, the contents and the values. The
/// caller calls `write_block` for every block of every piece that `write_order` returns (several
/// threads may do this), and then `commit`. If the writer is destroyed without commit, the
/// destination stays as it was. Equal contents and bytes give equal files, for any number of
/// threads, and also if the work was interrupted and resumed (JournalOptions).
class CheckpointWriter {
 public:
  /// Names a piece by its place in the writer's contents. Only 8 bytes, because a large checkpoint
  /// has millions of pieces. 32 bits suffice: no memory holds 2^32 tensors, or pieces of a tensor.
  struct PieceId {
    std::uint32_t tensor_index = 0;
    std::uint32_t piece_index = 0;

    PieceId() = default;
    PieceId(std::size_t tensor, std::size_t piece)
        : tensor_index(static_cast<std::uint32_t>(tensor)),
          piece_index(static_cast<std::uint32_t>(piece)) {
      TESSERA_CHECK(tensor_index == tensor && piece_index == piece);
    }
    friend auto operator<=>(const PieceId&, const PieceId&) = default;
  };

  virtual ~CheckpointWriter() = default;

  /// Returns the contents that this writer writes. Indexes in a PieceId refer to these contents.
  virtual const CheckpointContents& contents() const = 0;

  /// Returns the pieces that the caller must write, in the order in which it must start their
  /// blocks. Empty pieces, and linked pieces without a patch, are not there. The view is valid
  /// until `commit`.
  virtual std::span<const PieceId> write_order() const = 0;

  /// Returns how many elements each block of `piece` must have; the last block has the rest.
  virtual std::int64_t block_numel(PieceId piece) const = 0;

  /// Takes one block of a piece: the elements from `begin` (a multiple of `block_numel`) on, in the
  /// row-major order of the piece's region, little-endian. Several threads may call at once, if
  /// they start blocks in `write_order`; a writer that needs this order makes threads wait.
  virtual void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) = 0;

  /// Returns true if an interrupted writer of the same work has written this block and its checksum
  /// is right: the block is then done. If it returns false, the caller must call `write_block` for
  /// it. Same order and thread-safety as `write_block`. `room`: memory of the block's size for the
  /// writer to use; its content after the call is undefined.
  virtual bool resume_block(PieceId /*piece*/, std::int64_t /*begin*/,
                            std::span<std::byte> /*room*/) {
    return false;
  }

  /// Returns whether this writer resumes the work of an interrupted writer.
  virtual bool is_resumed() const { return false; }
  /// Makes the destructor without commit keep the finished blocks, for another writer to resume. A
  /// resumed writer does this by itself. Returns false if there is no finished block or no journal.
  virtual bool keep_work() noexcept { return false; }

  /// Makes every thread that waits inside `write_block` or `resume_block` throw Error(interrupted).
  /// Call it when a block will never be written.
  virtual void abandon() noexcept = 0;

  /// Syncs all files and makes the checkpoint appear. Requires: every block was written or resumed.
  virtual void commit() = 0;
};

}  // namespace tessera::formats
