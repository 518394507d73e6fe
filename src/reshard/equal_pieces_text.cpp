#include "reshard/equal_pieces_text.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::PiecePair;

bool is_same_piece(const PiecePair& a, const PiecePair& b) {
  return a.piece.tensor_index == b.piece.tensor_index && a.piece.piece_index == b.piece.piece_index;
}

[[noreturn]] void refuse_text(std::string_view text, const std::string& path) {
  throw Error::expected(ErrorKind::mismatch, {.path = path}, "message about the base",
                        "indices of pieces, and runs of their rows", printable(text.substr(0, 20)));
}

/// Removes a number of at most `max` from the front of `text`. Returns the number.
std::int64_t take_number(std::string_view& text, std::int64_t max, const std::string& path) {
  std::int64_t number = 0;
  const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > max) refuse_text(text, path);
  text.remove_prefix(static_cast<std::size_t>(at - text.data()));
  return number;
}

/// Removes `character` from the front of `text`, if it is there. Returns whether it was.
bool take(std::string_view& text, char character) {
  if (!text.starts_with(character)) return false;
  text.remove_prefix(1);
  return true;
}

std::string rows_to_text(const formats::RowSet& rows) {
  std::string text;
  std::int64_t begin = 0;  // of the run
  std::int64_t end = 0;
  std::int64_t before = 0;  // the end of the run before
  const auto add_run = [&] {
    if (begin == end) return;
    if (!text.empty()) text += ",";
    text += std::to_string(begin - before) + "+" + std::to_string(end - begin);
    before = end;
  };
  rows.for_each(0, rows.num_rows(), [&](std::int64_t row) {
    if (row != end) {
      add_run();
      begin = row;
    }
    end = row + 1;
  });
  add_run();
  return text;
}

/// Removes runs of rows from the front of `text`. Returns an empty set if there are none.
formats::RowSet take_rows(std::string_view& text, std::int64_t num_rows, const std::string& path) {
  if (text.empty() || text.starts_with(' ')) return {};
  formats::RowSet rows(num_rows);
  std::int64_t row = 0;
  do {
    row += take_number(text, num_rows - row, path);
    if (!take(text, '+')) refuse_text(text, path);
    const std::int64_t end = row + take_number(text, num_rows - row, path);
    for (; row < end; ++row) rows.insert(row);
  } while (take(text, ','));
  return rows;
}

/// What one text says, behind the identity.
class Parser {
 public:
  Parser(const formats::CheckpointContents& contents, std::span<const PiecePair> pairs,
         const std::string& path)
      : contents_(contents), pairs_(pairs), path_(path), is_named_(pairs.size(), false) {}

  void parse(std::string_view text) {
    const auto num_pairs = static_cast<std::int64_t>(pairs_.size());
    while (take(text, ' ')) {
      const std::string_view entry = text;
      const std::int64_t begin = take_number(text, num_pairs, path_);
      if (take(text, '-')) {
        const std::int64_t end = take_number(text, num_pairs, path_);
        for (std::int64_t i = begin; i < end; ++i) is_named_[static_cast<std::size_t>(i)] = true;
      } else if (begin < num_pairs && take(text, ':')) {
        parse_rows(text, static_cast<std::size_t>(begin));
      } else {
        refuse_text(entry, path_);
      }
    }
    if (!text.empty()) refuse_text(text, path_);
  }

  formats::PieceMatches take_matches() {
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      if (is_named_[i]) matches_.pairs.push_back(pairs_[i]);
    }
    return std::move(matches_);
  }

 private:
  void parse_rows(std::string_view& text, std::size_t number) {
    const formats::CheckpointWriter::PieceId id = pairs_[number].piece;
    const formats::TensorEntry& tensor = contents_.tensors[id.tensor_index];
    const auto rows = formats::rows_to_patch(tensor.pieces[id.piece_index].region, tensor.meta);
    if (!rows) refuse_text(text, path_);
    matches_.changed_rows.insert_or_assign(id, take_rows(text, rows->num_rows, path_));
    is_named_[number] = true;
  }

  const formats::CheckpointContents& contents_;
  const std::span<const PiecePair> pairs_;
  const std::string& path_;
  std::vector<bool> is_named_;  // one per pair
  formats::PieceMatches matches_;
};

}  // namespace

std::string equal_pieces_to_text(const formats::BaseCheckpoint& base,
                                 std::span<const PiecePair> pairs,
                                 const formats::PieceMatches& matches, RowsInText rows_in_text) {
  std::string text = base.identity();
  std::size_t next = 0;  // index in matches.pairs
  const auto is_next = [&](std::size_t i) {
    return i < pairs.size() && next < matches.pairs.size() &&
           is_same_piece(pairs[i], matches.pairs[next]);
  };
  for (std::size_t i = 0; i < pairs.size();) {
    const auto changed = matches.changed_rows.find(pairs[i].piece);
    if (!is_next(i)) {
      ++i;
    } else if (changed != matches.changed_rows.end()) {
      text += " " + std::to_string(i++) + ":";
      if (rows_in_text == RowsInText::say) text += rows_to_text(changed->second);
      ++next;
    } else {
      const std::size_t begin = i;
      for (; is_next(i) && !matches.changed_rows.contains(pairs[i].piece); ++i) ++next;
      text += " " + std::to_string(begin) + "-" + std::to_string(i);
    }
  }
  return text;
}

formats::PieceMatches equal_pieces_from_texts(const formats::BaseCheckpoint& base,
                                              const formats::CheckpointContents& contents,
                                              std::span<const PiecePair> pairs,
                                              std::span<const std::string> texts,
                                              const std::string& path) {
  Parser parser(contents, pairs, path);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const std::string_view text = texts[rank];
    const std::string_view identity = text.substr(0, text.find(' '));
    if (identity != base.identity()) {
      throw Error::expected(ErrorKind::mismatch, {.path = path}, "base",
                            "the same checkpoint on all ranks, here " + base.identity(),
                            std::string(identity) + " on rank " + std::to_string(rank),
                            "was it replaced during the save?");
    }
    parser.parse(text.substr(identity.size()));
  }
  return parser.take_matches();
}

}  // namespace tessera::reshard
