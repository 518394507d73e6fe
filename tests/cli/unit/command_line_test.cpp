#include "cli/command_line.h"

#include <gmock/gmock.h>

#include <csignal>
#include <thread>

#include "cli/stop_signals.h"

namespace tessera::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class CommandLineTest : public ::testing::Test {
 protected:
  CommandLineTest() {
    command_line_.add_command("ls", "List", [this] { return ran("ls"); })
        .argument("PATH", path_, "checkpoint")
        .arguments("GLOB...", globs_, "tensors")
        .flag("--json", json_, "as JSON")
        .option("--depth", "N", depth_, "levels")
        .option("--rtol", "X", rtol_, "tolerance")
        .option("--only", "GLOB", only_, "tensors")
        .size_option("--memory", "SIZE", memory_, "bound");
    command_line_.add_command("layout", "Map", [this] { return ran("layout"); })
        .argument("PATH", path_, "checkpoint");
    command_line_.add_command("merge", "Join", [this] { return ran("merge"); })
        .argument("SRC", path_, "checkpoint")
        .arguments("SRC...", globs_, "more")
        .argument("DST", destination_, "checkpoint");
    command_line_.set_default_command("ls");
  }
  ExitCode ran(std::string name) {
    ran_ = std::move(name);
    return ExitCode::done;
  }
  void run(std::vector<const char*> words) {
    words.insert(words.begin(), "tool");
    command_line_.run(static_cast<int>(words.size()), words.data());
  }
  std::string usage_error(std::vector<const char*> words) {
    try {
      run(std::move(words));
    } catch (const UsageError& error) {
      return error.what();
    }
    return "none";
  }

  Terminal terminal_{-1, -1};
  CommandLine command_line_{"tool", "Does things", terminal_};
  std::string ran_;
  std::string path_;
  std::string destination_;
  std::vector<std::string> globs_;
  std::vector<std::string> only_;
  bool json_ = false;
  int depth_ = -1;
  double rtol_ = 0;
  std::uint64_t memory_ = 0;
};

TEST_F(CommandLineTest, TakesOptionsAndArgumentsInAnyOrder) {
  run({"ls", "--json", "dir", "--depth=3", "a*", "--memory", "1KiB", "b*", "--rtol", "1e-3"});
  EXPECT_EQ(ran_, "ls");
  EXPECT_EQ(path_, "dir");
  EXPECT_THAT(globs_, ElementsAre("a*", "b*"));
  EXPECT_TRUE(json_);
  EXPECT_EQ(depth_, 3);
  EXPECT_EQ(memory_, 1024U);
  EXPECT_EQ(rtol_, 1e-3);
}

TEST_F(CommandLineTest, ARepeatedOptionTakesOneValueEachTime) {
  run({"ls", "--only", "a", "--only", "b", "dir"});
  EXPECT_THAT(only_, ElementsAre("a", "b"));
  EXPECT_EQ(path_, "dir");
}

TEST_F(CommandLineTest, WhatIsAddedBehindManyArgumentsIsTheLast) {
  run({"merge", "a", "b", "c", "d"});
  EXPECT_EQ(path_, "a");
  EXPECT_THAT(globs_, ElementsAre("b", "c"));
  EXPECT_EQ(destination_, "d");
  globs_.clear();
  run({"merge", "a", "d"});
  EXPECT_THAT(globs_, IsEmpty());
  EXPECT_EQ(destination_, "d");
  EXPECT_EQ(usage_error({"merge", "a"}), "DST is missing");
}

TEST_F(CommandLineTest, WithoutAVerbTheDefaultRuns) {
  run({"./dir", "x"});
  EXPECT_EQ(ran_, "ls");
  EXPECT_EQ(path_, "./dir");
  EXPECT_THAT(globs_, ElementsAre("x"));
}

TEST_F(CommandLineTest, AWordUnlikeAnyVerbIsAPathThatIsMissing) {
  run({"nowhere", "x"});
  EXPECT_EQ(ran_, "ls");
  EXPECT_EQ(path_, "nowhere");
}

TEST_F(CommandLineTest, WhatFollowsTwoDashesIsNoOption) {
  run({"ls", "--", "--json", "--help"});
  EXPECT_EQ(path_, "--json");
  EXPECT_THAT(globs_, ElementsAre("--help"));
  EXPECT_FALSE(json_);
}

TEST_F(CommandLineTest, WrongUseIsNamed) {
  EXPECT_EQ(usage_error({}), "expected a command or a checkpoint, found no arguments");
  EXPECT_EQ(usage_error({"layout"}), "PATH is missing");
  EXPECT_EQ(usage_error({"layout", "dir", "x"}), "unexpected argument 'x'");
  EXPECT_EQ(usage_error({"ls", "dir", "--jsn"}), "unknown option --jsn");
  EXPECT_EQ(usage_error({"ls", "dir", "--depth", "x"}),
            "--depth: expected a whole number, found 'x'");
  EXPECT_EQ(usage_error({"ls", "dir", "--depth", "-1"}), "--depth: expected 0 or more, found -1");
  EXPECT_EQ(usage_error({"ls", "dir", "--rtol", "nan"}), "--rtol: expected 0 or more, found nan");
  EXPECT_EQ(usage_error({"ls", "dir", "--memory", "lots"}),
            "--memory: expected a size such as 256MiB, found 'lots'");
  EXPECT_EQ(usage_error({"ls", "dir", "--color", "red"}),
            "--color: expected auto, always or never, found 'red'");
  EXPECT_EQ(usage_error({"lz", "dir"}),
            "'lz' is neither a command nor a path (did you mean 'ls'?)");
  EXPECT_THAT(ran_, IsEmpty());
}

TEST(WrapTest, BreaksAtSpacesAndIndents) {
  EXPECT_EQ(wrap("one two three", 7, 2), "one two\n  three");
  EXPECT_EQ(wrap("unbreakable", 3, 0), "unbreakable");
  EXPECT_EQ(wrap("", 3, 0), "");
}

TEST(StopSignalsTest, TheFirstSignalAsksForAStop) {
  StopSignals signals;
  const std::stop_token token = signals.token();
  EXPECT_FALSE(token.stop_requested());
  std::raise(SIGTERM);
  for (int i = 0; i < 1000 && !token.stop_requested(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(token.stop_requested());
}

TEST(StopSignalsTest, TheSecondSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        StopSignals signals;
        std::raise(SIGINT);
        std::raise(SIGINT);
        std::_Exit(0);
      },
      ::testing::KilledBySignal(SIGINT), "");
}

}  // namespace
}  // namespace tessera::cli
