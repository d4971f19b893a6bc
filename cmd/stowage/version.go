// This file owns `stowage version`: what the Go toolchain wrote into the binary.

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// version says what was built, from what, and with what.
type version struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Time     string `json:"time,omitempty"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// thisVersion reads the running binary. `go run` and builds outside of a
// checkout carry no commit, which is left out rather than guessed.
func thisVersion() version {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return versionOf(info)
}

func versionOf(info *debug.BuildInfo) version {
	v := version{
		Version:  strings.Trim(info.Main.Version, "()"),
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if v.Version == "" {
		v.Version = "devel"
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Commit = s.Value
		case "vcs.time":
			v.Time = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

func (v version) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "stowage %s", v.Version)
	if v.Commit != "" {
		fmt.Fprintf(&s, ", commit %.12s", v.Commit)
		if v.Modified {
			s.WriteString(" with changes")
		}
		if v.Time != "" {
			fmt.Fprintf(&s, " of %s", v.Time)
		}
	}
	fmt.Fprintf(&s, ", %s, %s", v.Go, v.Platform)
	return s.String()
}

func newVersion() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Say which version this is",
		Long:    "Print the module version, the commit it was built from where known, the Go\nversion and the platform.",
		Example: "  stowage version\n  stowage version --json",
		Args:    noArgs,
	}
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		v := thisVersion()
		if *asJSON {
			return printJSON(cmd, v)
		}
		fmt.Fprintln(cmd.OutOrStdout(), v)
		return nil
	}
	return cmd
}
