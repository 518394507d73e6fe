#include "cli/output_file.h"

#include <gmock/gmock.h>

#include "cli/json_output.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"

namespace tessera::cli {
namespace {

using test::ThrowsError;

class OutputFileTest : public ::testing::Test {
 protected:
  std::string path() const { return join_path(directory_.path(), "out"); }
  std::string content() const { return read_file(fs_, path(), 1 << 26); }

  FileSystem& fs_ = FileSystem::posix();
  test::TemporaryDirectory directory_;
};

TEST_F(OutputFileTest, AppearsWholeOnCommit) {
  std::string expected;
  {
    OutputFile file(fs_, path(), OverwritePolicy::refuse, "-o");
    for (int i = 0; i < 300'000; ++i) {  // more than one buffer
      file.write("line\n");
      expected += "line\n";
    }
    EXPECT_FALSE(fs_.kind_of(path()));
    file.commit();
  }
  EXPECT_EQ(content(), expected);
  EXPECT_EQ(fs_.list_directory(directory_.path()), std::vector<std::string>{"out"});
}

TEST_F(OutputFileTest, LeavesNothingWithoutCommit) {
  {
    OutputFile file(fs_, path(), OverwritePolicy::refuse, "-o");
    file.write("half");
  }
  EXPECT_TRUE(fs_.list_directory(directory_.path()).empty());
}

TEST_F(OutputFileTest, WhatIsThereStaysUntilItIsReplaced) {
  const auto write = [&](OverwritePolicy overwrite, std::string_view text) {
    OutputFile file(fs_, path(), overwrite, "-o");
    file.write(text);
    file.commit();
  };
  write(OverwritePolicy::refuse, "one");
  EXPECT_THAT([&] { write(OverwritePolicy::refuse, "two"); },
              ThrowsError(ErrorKind::already_exists, "--overwrite replaces it"));
  EXPECT_EQ(content(), "one");
  write(OverwritePolicy::replace, "three");
  EXPECT_EQ(content(), "three");

  fs_.remove_all(path());
  fs_.make_directory(path());
  EXPECT_THAT([&] { write(OverwritePolicy::replace, "four"); },
              ThrowsError(ErrorKind::invalid_argument, "-o: expected a file"));
  EXPECT_EQ(fs_.kind_of(path()), FileKind::directory);
}

TEST(JsonOutputTest, GoesToWhateverTakesText) {
  std::string text;
  JsonOutput json([&](std::string_view more) { text += more; }, 1);
  json.key("list").begin_array().value(1).value("</b>").end_array().finish();
  EXPECT_EQ(text, "{\n \"schema\": 1,\n \"list\": [\n  1,\n  \"</b>\"\n ]\n}\n");
}

}  // namespace
}  // namespace tessera::cli
