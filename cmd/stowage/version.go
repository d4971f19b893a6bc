// This file owns `stowage version`: the version, and what the Go toolchain recorded in
// the binary.

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/version"
)

// buildVersion describes the binary: its version, its source and its toolchain.
type buildVersion struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Time     string `json:"time,omitempty"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// thisVersion describes the running binary. It leaves the commit out if the binary has
// none, as with `go run` and builds outside of a checkout.
func thisVersion() buildVersion {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return versionOf(info)
}

// versionOf describes a binary by its build information.
func versionOf(info *debug.BuildInfo) buildVersion {
	v := buildVersion{
		Version:  version.Number(),
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
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

// String returns the description as one line.
func (v buildVersion) String() string {
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
		Short:   "Print the version",
		Long:    "Print the version, the commit if it is known, the Go version and the platform.",
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
