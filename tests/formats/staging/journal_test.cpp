#include "formats/staging/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/random.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using test::ThrowsError;

constexpr std::uint64_t kMaxNbytes = 1 << 20;

class JournalTest : public ::testing::Test {
 protected:
  std::string path() const { return tmp_ / "c.partial.journal"; }
  std::string text() const { return read_file(fs_, path(), kMaxNbytes); }
  void put(const std::string& text) const {
    std::ofstream(path(), std::ios::binary | std::ios::trunc) << text;
  }

  /// Notes the first `num_blocks` blocks of one piece in a new journal, 100 bytes each.
  void write(int num_blocks) {
    fs_.remove_all(path());
    Journal journal(fs_, path(), identity_);
    for (int i = 0; i < num_blocks; ++i) journal.note(id(i), block(i));
  }
  static BlockId id(int i) { return {{3, 1}, i * 100}; }
  static FinishedBlock block(int i) {
    const auto begin = static_cast<std::uint64_t>(i) * 100;
    return {.range = {begin, begin + 100}, .checksum = 0xFEDCBA9876543210U + begin};
  }

  /// Expects the first blocks that `write` writes and nothing else. Returns how many they are.
  static int count_first(const JournalContents& contents) {
    for (std::size_t i = 0; i < contents.entries.size(); ++i) {
      const auto number = static_cast<int>(i);
      EXPECT_EQ(contents.entries[i].id, id(number));
      EXPECT_EQ(contents.entries[i].block.range, block(number).range);
      EXPECT_EQ(contents.entries[i].block.checksum, block(number).checksum);
    }
    return static_cast<int>(contents.entries.size());
  }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory tmp_;
  ResumeIdentity identity_{{"plan", "0123"}, {"source a\nb\xFF.h5", "17 bytes"}};
};

TEST_F(JournalTest, WhatIsNotedIsReadBackInOrder) {
  {
    Journal journal(fs_, path(), identity_);
    EXPECT_FALSE(journal.has_finished_blocks());
    journal.note(id(2), {.range = {7, 9}, .form = BlockForm::raw_chunk, .checksum = 1});
    journal.note(id(0), {.range = {5, 7}, .form = BlockForm::filtered_chunk, .checksum = ~0ULL});
    journal.note(id(2), block(2));
    EXPECT_TRUE(journal.has_finished_blocks());
  }
  const auto contents = read_journal(fs_, path());
  ASSERT_TRUE(contents.has_value());
  EXPECT_EQ(contents->identity, identity_);
  ASSERT_EQ(contents->entries.size(), 2U);
  EXPECT_EQ(contents->entries[0].id, id(0));
  EXPECT_EQ(contents->entries[0].block.form, BlockForm::filtered_chunk);
  EXPECT_EQ(contents->entries[0].block.checksum, ~0ULL);
  EXPECT_EQ(contents->entries[1].id, id(2));
  EXPECT_EQ(contents->entries[1].block.range, block(2).range);  // as noted the second time
  EXPECT_EQ(contents->end_nbytes, text().size());
}

TEST_F(JournalTest, WithoutAFinishedBlockThereIsNoJournal) {
  EXPECT_FALSE(read_journal(fs_, path()).has_value());
  write(0);
  EXPECT_FALSE(read_journal(fs_, path()).has_value());
}

TEST_F(JournalTest, CutShortAnywhereItSaysOfTheBlocksBefore) {
  write(5);
  const std::string whole = text();
  int most = 0;
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    put(whole.substr(0, nbytes));
    const auto contents = read_journal(fs_, path());
    const int found = contents ? count_first(*contents) : 0;
    ASSERT_GE(found, most);
    most = found;
  }
  EXPECT_EQ(most, 4);
}

TEST_F(JournalTest, ADamagedByteAnywhereEndsWhatIsBelieved) {
  write(4);
  const std::string whole = text();
  const std::size_t magic_nbytes = std::string("tessera-journal 1\n").size();
  test::Random random;
  for (std::size_t at = magic_nbytes; at < whole.size(); ++at) {
    SCOPED_TRACE(at);
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << random.between(0, 8)));
    put(damaged);
    const auto contents = read_journal(fs_, path());
    const int found = contents ? count_first(*contents) : 0;
    ASSERT_LT(found, 4);
  }
}

TEST_F(JournalTest, AnotherGoesOnBehindTheLastWholeLine) {
  write(2);
  put(text() + "0123456789abcdef torn" + std::string(1000, '?'));
  auto contents = read_journal(fs_, path());
  ASSERT_TRUE(contents.has_value());
  {
    Journal journal(fs_, path(), *std::move(contents));
    EXPECT_TRUE(journal.is_resumed());
    EXPECT_TRUE(journal.has_finished_blocks());
    ASSERT_TRUE(journal.find(id(1)).has_value());
    EXPECT_EQ(journal.find(id(1))->range, block(1).range);
    EXPECT_FALSE(journal.find(id(2)).has_value());
    journal.note(id(2), block(2));
  }
  contents = read_journal(fs_, path());
  ASSERT_TRUE(contents.has_value());
  EXPECT_EQ(count_first(*contents), 3);
  EXPECT_EQ(contents->end_nbytes, text().size());  // the incomplete line was removed
}

TEST_F(JournalTest, OfAnEndlessFileLittleIsRead) {
  constexpr std::uint64_t kNbytes = std::uint64_t{5} << 30;
  constexpr std::uint64_t kMaxReadNbytes = std::uint64_t{1} << 20;
  write(3);
  fs_.open_for_update(path())->write_at(kNbytes, std::as_bytes(std::span("?", 1)));
  test::FaultFileSystem counting(fs_, tmp_.path());
  const auto contents = read_journal(counting, path());
  ASSERT_TRUE(contents.has_value());
  EXPECT_EQ(count_first(*contents), 3);
  EXPECT_LT(counting.num_bytes_read(), kMaxReadNbytes);
}

TEST_F(JournalTest, ItMayBeLongAndSayTheSameAgainAndAgain) {
  constexpr int kNumNoted = 150'000;
  constexpr int kNumBlocks = 1000;
  identity_["source"] = std::string(300'000, 'x');
  {
    Journal journal(fs_, path(), identity_);
    for (int i = 0; i < kNumNoted; ++i) journal.note(id(i % kNumBlocks), block(i));
  }
  const auto contents = read_journal(fs_, path());
  ASSERT_TRUE(contents.has_value());
  EXPECT_EQ(contents->identity, identity_);
  ASSERT_EQ(contents->entries.size(), std::size_t{kNumBlocks});
  for (int i = 0; i < kNumBlocks; ++i) {
    const auto& entry = contents->entries[static_cast<std::size_t>(i)];
    EXPECT_EQ(entry.id, id(i));
    EXPECT_EQ(entry.block.range, block(kNumNoted - kNumBlocks + i).range);
  }
  EXPECT_EQ(contents->end_nbytes, fs_.open(path())->nbytes());
}

TEST_F(JournalTest, ALineIsInTheFileAsSoonAsItStandsForManyBytes) {
  Journal journal(fs_, path(), identity_);
  const std::size_t before = text().size();
  journal.note(id(0), block(0));
  EXPECT_EQ(text().size(), before);
  journal.note(id(1), {.range = {0, std::uint64_t{8} << 20}});
  EXPECT_GT(text().size(), before);
}

TEST_F(JournalTest, AnotherFileOfTheNameIsRefused) {
  put("my notes");
  EXPECT_THAT([&] { read_journal(fs_, path()); },
              ThrowsError(ErrorKind::already_exists, "found another file"));
  put("tessera-journal 2\nwhat will come");
  EXPECT_THAT([&] { read_journal(fs_, path()); },
              ThrowsError(ErrorKind::unsupported, "expected version 1, found tessera-journal 2"));
}

TEST_F(JournalTest, WhatCannotBeReadBackIsNotThere) {
  write(1);
  put(text());
  const Journal journal(fs_, path(), *read_journal(fs_, path()));
  std::vector<std::byte> room(4);
  EXPECT_TRUE(journal.read_back(path(), {0, 4}, room));
  EXPECT_EQ(room[0], std::byte{'t'});
  EXPECT_FALSE(journal.read_back(path(), {0, 5}, room));
  EXPECT_FALSE(journal.read_back(path(), {1 << 30, (1 << 30) + 4}, room));
  EXPECT_FALSE(journal.read_back(path() + "2", {0, 4}, room));
}

}  // namespace
}  // namespace tessera::formats
