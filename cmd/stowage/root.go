// This file owns the tree of commands.

package main

import (
	"github.com/spf13/cobra"
)

// flagsTemplate is the list of flags in a help text.
const flagsTemplate = `Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}`

// usageTemplate is the part of a help text below its first paragraphs. Commands
// that hold others are not run themselves.
const usageTemplate = `Usage:
  {{if .HasAvailableSubCommands}}{{.CommandPath}} <command>{{else}}{{.UseLine}}{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if or .IsAvailableCommand (eq .Name "help")}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

` + flagsTemplate + `{{end}}{{if .HasAvailableSubCommands}}

Say "{{.CommandPath}} <command> --help" for more about a command.{{end}}
`

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "stowage",
		Short: "Train large models in less memory",
		Long: `Stowage keeps what a training step must remember where it fits: in place, in
pages on the accelerator, or in host memory. It has a trainer, a planner, and a
runtime for training loops written in Go. It runs on any CPU, and on NVIDIA GPUs
with nothing but their driver.`,
		Example: `  stowage train                 what each memory policy takes, on a small model
  stowage report runs/compare   pictures of that, or of any run
  stowage doctor                what this machine offers, and what is missing
  stowage bench copy --json     how fast it copies, for machines to read
  stowage bench stash           how fast rows go into pages and back
  stowage bench offload         what offloading saves, and what it costs`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return chooseCommand(cmd, args)
		},
		Version:       thisVersion().String(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(flagError)
	root.SetUsageTemplate(usageTemplate)
	root.SetHelpCommand(newHelp(root))
	root.SetVersionTemplate("{{.Version}}\n")
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(newTrain(), newPlan(), newReportCommand(), newDoctor(), newBench(), newVersion())
	return root
}

// newHelp is cobra's help command, except that a wrong topic is an error.
func newHelp(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:     "help [command]",
		Short:   "Say how a command is used",
		Example: "  stowage help bench copy",
		RunE: func(cmd *cobra.Command, args []string) error {
			target, rest, err := root.Find(args)
			if err != nil {
				return err
			}
			if len(rest) > 0 {
				return chooseCommand(target, rest)
			}
			target.InitDefaultHelpFlag()
			return target.Help()
		},
	}
}

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure this machine",
		Long:    "Measure what this machine does, through the same device that training uses.",
		Example: "  stowage bench copy\n  stowage bench stash\n  stowage bench offload\n  stowage bench pools",
		Args:    cobra.ArbitraryArgs,
		RunE:    chooseCommand,
	}
	cmd.AddCommand(newBenchCopy(), newBenchStash(), newBenchOffload(), newBenchPools())
	return cmd
}
