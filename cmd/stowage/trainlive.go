// This file owns the viewers of `stowage train`: the terminal, and browsers with --serve.

package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/observe/live"
	"github.com/stowage-dev/stowage/train/run"
)

// watch returns what shows a run. The caller calls announce once the flags are known to be
// right, and over after everything is printed; it lets browsers fetch the last state.
func (f *trainFlags) watch(cmd *cobra.Command, stopper *stopper) (p *run.Progress, announce, over func(), err error) {
	var screen *live.Screen
	if said, ok := cmd.ErrOrStderr().(*plaintext.Writer); ok && !f.plain {
		if file, ok := said.Unwrap().(*os.File); ok {
			screen = live.NewScreen(file, os.Getenv)
		}
	}
	announce, over = func() {}, func() {}
	var server *live.Server
	switch {
	case f.serve != "" && f.dryRun:
		return nil, announce, over, usagef("--serve has nothing to show with --dry-run; leave one of them out")
	case f.serve != "":
		if server, err = live.Listen(f.serve, thisVersion().Version); err != nil {
			return nil, announce, over, usagef("--serve: %w", err)
		}
		over = server.Close
	}
	p = run.NewProgress(stopper.watched(cmd.ErrOrStderr()), screen, server)
	if server != nil {
		announce = func() {
			p.Say("live at %s", server.URL())
			if server.Public() {
				p.Say("warning: anyone on the network can see this run because of --serve %s", f.serve)
			}
		}
	}
	return p, announce, over, nil
}
