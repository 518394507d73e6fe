#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/native/index.h"

namespace tessera::formats::native {
namespace {

constexpr std::uint64_t kNbytes = 24;  // of each piece

/// Pieces that take little memory: plain, in the file of their own rank.
const std::vector<StoredPiece> kUsual = {
    {},
    {.position = 1, .encoding = Encoding::plain, .begin = 4096, .checksum_or_table = UINT64_MAX},
    {.position = 2,
     .encoding = Encoding::plain,
     .begin = (std::uint64_t{1} << StoredPieces::kBeginBits) - 1,
     .checksum_or_table = 1}};

StoredPiece with_nbytes(StoredPiece stored) {
  if (stored.encoding == Encoding::plain) stored.stored_nbytes = kNbytes;
  return stored;
}

TEST(NativeStoredPiecesTest, EachPieceIsGivenBack) {
  const std::vector<StoredPiece> others = {
      {.position = 7, .encoding = Encoding::plain, .begin = 1, .checksum_or_table = 2},
      {.position = 1, .file = 3, .encoding = Encoding::plain, .begin = 1},
      {.position = 2, .encoding = Encoding::zstd, .begin = 5, .stored_nbytes = 17},
      {.position = 3, .file = kMaxLinkedFiles, .encoding = Encoding::zstd, .stored_nbytes = 1}};
  StoredPieces pieces;
  pieces.add(kUsual.size());
  for (std::size_t p = 0; p < kUsual.size(); ++p) pieces.set({0, p}, kUsual[p]);
  pieces.add(others.size());
  for (std::size_t p = 0; p < others.size(); ++p) pieces.set({1, p}, others[p]);
  pieces.add(1);
  EXPECT_EQ(pieces.num_pieces(), kUsual.size() + others.size() + 1);
  for (std::size_t p = 0; p < kUsual.size(); ++p) {
    EXPECT_EQ(pieces.get({0, p}, kNbytes), with_nbytes(kUsual[p])) << p;
    EXPECT_EQ(pieces.file_of({0, p}), 0U);
  }
  for (std::size_t p = 0; p < others.size(); ++p) {
    EXPECT_EQ(pieces.get({1, p}, kNbytes), with_nbytes(others[p])) << p;
    EXPECT_EQ(pieces.file_of({1, p}), others[p].file);
  }
  EXPECT_EQ(pieces.get({2, 0}, kNbytes), StoredPiece());
}

TEST(NativeStoredPiecesTest, AnOtherPlaceReplacesTheFirst) {
  StoredPieces pieces;
  pieces.add(2);
  pieces.set({0, 1}, {.position = 1, .encoding = Encoding::zstd, .begin = 9, .stored_nbytes = 8});
  pieces.set({0, 1}, kUsual[1]);
  pieces.set_checksum({0, 1}, 5);
  StoredPiece expected = with_nbytes(kUsual[1]);
  expected.checksum_or_table = 5;
  EXPECT_EQ(pieces.get({0, 1}, kNbytes), expected);
  EXPECT_EQ(pieces.get({0, 0}, kNbytes), StoredPiece());
}

}  // namespace
}  // namespace tessera::formats::native
