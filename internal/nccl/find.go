// This file owns where the library is found.

package nccl

import (
	"path/filepath"
	"slices"
)

// Variable names a library to open instead of those that are found.
const Variable = "STOWAGE_NCCL"

var files = []string{"libnccl.so.2", "libnccl.so"}

// Names returns the names under which the library is looked for, in order: those that the
// loader resolves, then files in the folders of Python packages and CUDA toolkits.
func Names(getenv func(string) string) []string {
	if name := getenv(Variable); name != "" {
		return []string{name}
	}
	all := slices.Clone(files)
	add := func(folder string) {
		found, _ := filepath.Glob(filepath.Join(folder, files[0])) // a folder that is no pattern has none
		slices.Reverse(found)                                      // the newest first
		all = append(all, found...)
	}
	for _, root := range []string{getenv("VIRTUAL_ENV"), getenv("CONDA_PREFIX"), filepath.Join(getenv("HOME"), ".local"), "/usr/local", "/usr"} {
		if !filepath.IsAbs(root) {
			continue
		}
		add(filepath.Join(root, "lib"))
		for _, packages := range []string{"site-packages", "dist-packages"} {
			add(filepath.Join(root, "lib", "python3*", packages, "nvidia", "nccl", "lib"))
		}
	}
	for _, home := range []string{getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda"} {
		if home != "" {
			add(filepath.Join(home, "lib64"))
		}
	}
	return all
}
