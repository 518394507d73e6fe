#include "object_store/credentials.h"

#include <fstream>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"

namespace tessera::object_store {
namespace {

using test::ThrowsError;

class CredentialsTest : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) {
    std::ofstream(directory_.path() + "/" + name) << text;
  }
  S3Settings read() {
    return read_s3_settings([&](const std::string& name) -> std::optional<std::string> {
      if (name == "AWS_SHARED_CREDENTIALS_FILE") return directory_.path() + "/credentials";
      if (name == "AWS_CONFIG_FILE") return directory_.path() + "/config";
      const auto found = variables_.find(name);
      return found == variables_.end() ? std::nullopt : std::optional(found->second);
    });
  }

  test::TemporaryDirectory directory_;
  std::map<std::string, std::string> variables_;
};

TEST_F(CredentialsTest, WithoutAnyRequestsAreNotSigned) {
  const S3Settings settings = read();
  EXPECT_FALSE(settings.credentials);
  EXPECT_EQ(settings.region, "");
  EXPECT_EQ(settings.endpoint, "");
}

TEST_F(CredentialsTest, VariablesWinOverFiles) {
  write("credentials",
        "[default]\naws_access_key_id = file\naws_secret_access_key = file-secret\n");
  write("config", "[default]\nregion = eu-west-1\nendpoint_url = http://file\n");
  S3Settings settings = read();
  EXPECT_EQ(settings.credentials->access_key_id, "file");
  EXPECT_EQ(settings.credentials_source, "profile 'default'");
  EXPECT_EQ(settings.region, "eu-west-1");
  EXPECT_EQ(settings.endpoint, "http://file");

  variables_ = {{"AWS_ACCESS_KEY_ID", "var"},       {"AWS_SECRET_ACCESS_KEY", "var-secret"},
                {"AWS_SESSION_TOKEN", "token"},     {"AWS_DEFAULT_REGION", "eu-north-1"},
                {"AWS_ENDPOINT_URL", "http://all"}, {"AWS_ENDPOINT_URL_S3", "http://s3"}};
  settings = read();
  EXPECT_EQ(settings.credentials->access_key_id, "var");
  EXPECT_EQ(settings.credentials->secret_access_key, "var-secret");
  EXPECT_EQ(settings.credentials->session_token, "token");
  EXPECT_EQ(settings.region, "eu-north-1");
  EXPECT_EQ(settings.endpoint, "http://s3");
  variables_["AWS_REGION"] = "eu-south-1";
  EXPECT_EQ(read().region, "eu-south-1");
  variables_["AWS_NO_SIGN_REQUEST"] = "true";
  EXPECT_FALSE(read().credentials);
}

TEST_F(CredentialsTest, AProfileIsInBothFiles) {
  write("credentials",
        "# keys\n[other]\naws_access_key_id=o\naws_secret_access_key=o\n\n"
        "[mine]\r\nAWS_ACCESS_KEY_ID = id # of the team\r\naws_secret_access_key = a=b/c+d\r\n"
        "aws_session_token = t\r\n");
  write("config",
        "[profile mine]\nregion = us-west-2\ns3 =\n  region = nested\n  max_concurrent = 4\n"
        "[profile other]\nregion = us-east-2\n");
  variables_ = {{"AWS_PROFILE", "mine"}};
  const S3Settings settings = read();
  EXPECT_EQ(settings.credentials->access_key_id, "id");
  EXPECT_EQ(settings.credentials->secret_access_key, "a=b/c+d");
  EXPECT_EQ(settings.credentials->session_token, "t");
  EXPECT_EQ(settings.region, "us-west-2");
}

TEST_F(CredentialsTest, HalvesAndUnknownProfilesAreRefused) {
  variables_ = {{"AWS_ACCESS_KEY_ID", "var"}};
  EXPECT_THAT([&] { read(); }, ThrowsError(ErrorKind::invalid_argument, "only an access key ID"));
  variables_ = {{"AWS_PROFILE", "absent"}};
  EXPECT_THAT([&] { read(); },
              ThrowsError(ErrorKind::invalid_argument, "'absent', which is in neither"));
  write("config", "[profile absent]\nsso_session = s\n");
  EXPECT_THAT([&] { read(); }, ThrowsError(ErrorKind::invalid_argument, "export-credentials"));
}

TEST_F(CredentialsTest, TheDefaultProfileCanBeNamed) {
  write("config",
        "[default]\naws_access_key_id=d\naws_secret_access_key=d\n"
        "[profile\t 'my team' ]\naws_access_key_id=team\naws_secret_access_key=t\n"
        "[profile  \"mine\"]\naws_access_key_id=mine\naws_secret_access_key=m\n");
  variables_ = {{"AWS_DEFAULT_PROFILE", "mine"}};
  EXPECT_EQ(read().credentials->access_key_id, "mine");
  variables_ = {{"AWS_DEFAULT_PROFILE", "my team"}, {"AWS_PROFILE", "mine"}};
  EXPECT_EQ(read().credentials->access_key_id, "team");
  variables_ = {{"AWS_DEFAULT_PROFILE", "absent"}};
  EXPECT_THAT([&] { read(); },
              ThrowsError(ErrorKind::invalid_argument, "AWS_DEFAULT_PROFILE: expected a profile"));
}

/// AWS's tools use such keys only to get those of another identity.
TEST_F(CredentialsTest, KeysOfAProfileThatAssumesARoleAreRefused) {
  write("credentials", "[default]\naws_access_key_id=base\naws_secret_access_key=b\n");
  write("config", "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = default\n");
  EXPECT_THAT([&] { read(); },
              ThrowsError(ErrorKind::invalid_argument, "'default' with role_arn beside its keys"));
  variables_ = {{"AWS_ACCESS_KEY_ID", "var"}, {"AWS_SECRET_ACCESS_KEY", "v"}};
  EXPECT_EQ(read().credentials->access_key_id, "var");
}

TEST(ProfileFileTest, SkipsWhatItDoesNotKnow) {
  const ProfileFile file =
      parse_profile_file("a = 1\n[s\n[t]\nno equals\n = x\nb = 2;c\n; d = 3\nb2 =\n");
  EXPECT_EQ(file.size(), 1U);
  EXPECT_EQ(file.at("t").at("b"), "2;c");
  EXPECT_EQ(file.at("t").at("b2"), "");
}

}  // namespace
}  // namespace tessera::object_store
