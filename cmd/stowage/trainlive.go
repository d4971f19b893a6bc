// This file owns who watches `stowage train`: somebody at a terminal, and those whom
// --serve lets in.

package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/live"
	"github.com/stowage-dev/stowage/cmd/stowage/internal/trainrun"
)

// watch is what shows a run; over is called behind everything that is printed, and lets
// viewers fetch the end.
func (f *trainFlags) watch(cmd *cobra.Command) (p *trainrun.Progress, over func(), err error) {
	var screen *live.Screen
	if file, ok := cmd.ErrOrStderr().(*os.File); ok && !f.plain {
		screen = live.NewScreen(file, os.Getenv)
	}
	over = func() {}
	var server *live.Server
	switch {
	case f.serve != "" && f.dryRun:
		return nil, over, usagef("--serve has nothing to serve with --dry-run; leave one of them out")
	case f.serve != "":
		if server, err = live.Listen(f.serve, thisVersion().Version); err != nil {
			return nil, over, usagef("--serve: %v", err)
		}
		over = server.Close
	}
	p = trainrun.NewProgress(cmd.ErrOrStderr(), screen, server)
	if server != nil {
		p.Say("live at %s", server.URL())
		if server.Public() {
			p.Say("warning: anyone on the network can see this run, because of --serve %s", f.serve)
		}
	}
	return p, over, nil
}
