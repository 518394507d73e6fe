#include "reshard/equal_pieces_text.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::PiecePair;

bool is_same_piece(const PiecePair& a, const PiecePair& b) {
  return a.piece.tensor_index == b.piece.tensor_index && a.piece.piece_index == b.piece.piece_index;
}

/// Removes a number from the front of `text`, and the character after it. Returns the number.
std::size_t take_number(std::string_view& text, const std::string& path) {
  std::size_t number = 0;
  const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) {
    throw Error::expected(ErrorKind::mismatch, {.path = path}, "message about the base",
                          "ranges of numbers", printable(text.substr(0, 20)));
  }
  text.remove_prefix(std::min(static_cast<std::size_t>(at - text.data()) + 1, text.size()));
  return number;
}

}  // namespace

std::string equal_pieces_to_text(const formats::BaseCheckpoint& base,
                                 std::span<const PiecePair> pairs,
                                 std::span<const PiecePair> equal) {
  std::string text = base.identity();
  std::size_t next = 0;  // index in `equal`
  for (std::size_t i = 0; i < pairs.size() && next < equal.size();) {
    if (!is_same_piece(pairs[i], equal[next])) {
      ++i;
      continue;
    }
    const std::size_t begin = i;
    while (i < pairs.size() && next < equal.size() && is_same_piece(pairs[i], equal[next])) {
      ++i;
      ++next;
    }
    text += " " + std::to_string(begin) + "-" + std::to_string(i);
  }
  return text;
}

std::vector<PiecePair> equal_pieces_from_texts(const formats::BaseCheckpoint& base,
                                               std::span<const PiecePair> pairs,
                                               std::span<const std::string> texts,
                                               const std::string& path) {
  std::vector<bool> is_equal(pairs.size(), false);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::string_view text = texts[rank];
    const std::string_view identity = text.substr(0, text.find(' '));
    if (identity != base.identity()) {
      throw Error::expected(ErrorKind::mismatch, {.path = path}, "base",
                            "the same checkpoint on all ranks, here " + base.identity(),
                            std::string(identity) + " on rank " + std::to_string(rank),
                            "was it replaced during the save?");
    }
    text.remove_prefix(std::min(identity.size() + 1, text.size()));
    while (!text.empty()) {
      const std::size_t begin = take_number(text, path);
      const std::size_t end = std::min(take_number(text, path), pairs.size());
      for (std::size_t i = begin; i < end; ++i) is_equal[i] = true;
    }
  }
  std::vector<PiecePair> equal;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (is_equal[i]) equal.push_back(pairs[i]);
  }
  return equal;
}

}  // namespace tessera::reshard
