//! `kiln train --policy`.

use super::*;

#[test]
fn policies_that_cannot_be_followed_are_refused() {
    let place = place();
    let place = place.path();
    for (policy, expected) in [
        (
            "[ops]\nmhc = \"reference\"\n",
            "error: policy.toml: no policy decides on `mhc`, expected adamw, ",
        ),
        (
            "[ops]\nrope_qk = \"auto\"\n",
            "error: policy.toml: no policy decides on `rope_qk`, expected adamw, ",
        ),
        (
            "[ops]\nrms_norm = \"fused\"\n",
            "error: policy.toml: rms_norm = \"fused\": kernels run on cuda, wgpu and vulkan, not on cpu",
        ),
        ("default = \"fused\"\n", "error: policy.toml: default = \"fused\": kernels run on "),
        ("default = \"fast\"\n", "error: policy.toml is no policy of `kiln bench`"),
    ] {
        std::fs::write(place.join("policy.toml"), policy).expect("written");
        let train = ["train", "small.toml", "--device", "cpu", "--policy", "policy.toml"];
        let (status, _, err) = kiln(place, &train);
        assert_eq!(status, 2, "{err}");
        assert!(err.starts_with(expected), "{err}");
        assert!(!place.join("runs").exists(), "{policy}");
    }
    let policy = "default = \"auto\"\n[ops]\nrope = \"reference\"\n";
    std::fs::write(place.join("policy.toml"), policy).expect("written");
    let train = ["train", "small.toml", "--device", "cpu", "--policy", "policy.toml"];
    let (status, _, err) = kiln(place, &train);
    assert_eq!(status, 0, "{err}");
}
